// The instructions that CUDA C++ has no name for.
#pragma once

#include <cuda_runtime.h>

namespace microspec {

// Starts a copy of 16 bytes from global to shared memory; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// The same with 4 bytes and multiples of 4.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

// Ends a group of the copies that this thread has started.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread's copies but the last LATEST ones.
template <int LATEST>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
}

// With these two calls at its beginning, in this order, a kernel is started by Launch::start while the one before it
// in the stream still runs, and costs no latency of a launch. Nothing in global memory is read or written before the
// second call, which waits until all earlier work is done and seen. Chips before 9.0 start kernels one by one anyway.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads what this launch reads once: it takes no room in the L1.
template <typename Unit>
__device__ __forceinline__ Unit load_once(const Unit* source) {
  return __ldg(source);
}

template <>
__device__ __forceinline__ uint4 load_once<uint4>(const uint4* source) {
  uint4 data;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(source));
  return data;
}

}  // namespace microspec
