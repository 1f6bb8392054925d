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

// A kernel that calls this before it reads or writes global memory may be launched by Launch::start: it is set up while
// the kernel before it in the stream still runs, and waits here until all earlier work is done and seen. The kernel
// behind it is then let in, and no sooner: one that does not wait still finds everything done but this.
__device__ __forceinline__ void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A policy of the L2: lines that are loaded with it are the first to go.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads what is read once: it takes no room in the L1, and as much in the L2 as the policy says.
template <typename Unit>
__device__ __forceinline__ Unit load_once(const Unit* source, uint64_t policy) {
  return __ldg(source);
}

template <>
__device__ __forceinline__ uint4 load_once<uint4>(const uint4* source, uint64_t policy) {
  uint4 data;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(source), "l"(policy));
  return data;
}

}  // namespace microspec
