// Runs device code on a CPU: every thread of a block is a fiber, which goes on until a barrier or a warp operation.
//
// Enough of CUDA for the kernels of this project; blocks run one after another, and there are no clusters. A barrier
// that not all threads reach, or a warp operation that some lanes skip, is reported and not waited for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __shared__
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

namespace emulator {

struct Group {  // threads that wait for one another
  int size = 0, arrived = 0;
  long generation = 0;
};

struct Fiber {
  ucontext_t context;
  dim3 thread;
  int number = 0;
  bool is_done = false;
};

constexpr size_t STACK = 128 * 1024;

inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline Group block;
inline std::vector<Group> warps;
inline std::vector<uint64_t> lanes;  // what each thread brings to a warp operation
inline int votes = 0;
inline dim3 block_index, block_size, grid_size;
inline std::function<void()> body;
inline bool made_progress = false;
alignas(16) inline unsigned char dynamic_shared[256 * 1024];

inline void release(Group& group) {
  if (group.arrived == group.size && group.size > 0) {
    group.arrived = 0;
    ++group.generation;
    made_progress = true;
  }
}

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void wait(Group& group) {
  const long generation = group.generation;
  ++group.arrived;
  release(group);
  while (group.generation == generation) yield();
}

inline Group& warp() { return warps[current->number / 32]; }

inline void run_fiber() {
  body();
  current->is_done = true;
  made_progress = true;
  --block.size;
  --warp().size;
  release(block);
  release(warp());
  yield();
}

inline void run_block() {
  const int count = block_size.x * block_size.y * block_size.z;
  fibers = std::vector<Fiber>(count);
  stacks.resize(STACK * count);
  lanes.assign(count, 0);
  block = Group{count};
  warps.assign((count + 31) / 32, Group{});
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    fiber.number = i;
    fiber.thread = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    ++warps[i / 32].size;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + STACK * i;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (int left = count; left > 0;) {
    made_progress = false;
    left = 0;
    for (Fiber& fiber : fibers) {
      if (fiber.is_done) continue;
      current = &fiber;
      swapcontext(&scheduler, &fiber.context);
      left += !fiber.is_done;
    }
    if (left > 0 && !made_progress) {
      std::fprintf(stderr, "deadlock: a barrier or a warp operation is not reached by all of its threads\n");
      std::abort();
    }
  }
}

template <typename Kernel, typename... Arguments>
void launch(dim3 grid, dim3 threads, Kernel kernel, Arguments... arguments) {
  grid_size = grid;
  block_size = threads;
  body = [=] { kernel(arguments...); };
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = dim3(x, y);
      std::memset(dynamic_shared, 0x5A, sizeof dynamic_shared);
      run_block();
    }
  }
}

// What all lanes of the warp bring, in lane order; threads that have ended bring nothing.
template <typename Combine>
auto exchange(uint64_t value, Combine combine) {
  lanes[current->number] = value;
  wait(warp());
  const int first = current->number / 32 * 32;
  const auto result = combine(lanes.data() + first, std::min<int>(32, lanes.size() - first));
  wait(warp());
  return result;
}

template <typename T>
uint64_t pack(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T shuffle(T value, int lane) {
  return exchange(pack(value), [=](const uint64_t* all, int count) {
    return unpack<T>(all[lane >= 0 && lane < count ? lane : current->number % 32]);
  });
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

inline void __syncthreads() { emulator::wait(emulator::block); }

inline int __syncthreads_count(bool vote) {
  using namespace emulator;
  static int total = 0;
  if (vote) ++votes;
  wait(block);
  total = votes;
  wait(block);
  votes = 0;
  const int result = total;
  wait(block);
  return result;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulator::exchange(vote, [](const uint64_t* all, int count) {
    unsigned word = 0;
    for (int i = 0; i < count; ++i) word |= static_cast<unsigned>(all[i]) << i;
    return word;
  });
}

inline unsigned __match_any_sync(unsigned, int value) {
  const uint64_t own = emulator::pack(value);
  return emulator::exchange(own, [=](const uint64_t* all, int count) {
    unsigned word = 0;
    for (int i = 0; i < count; ++i) word |= static_cast<unsigned>(all[i] == own) << i;
    return word;
  });
}

inline int __ffs(unsigned word) { return __builtin_ffs(static_cast<int>(word)); }

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulator::exchange(value, [](const uint64_t* all, int count) {
    return static_cast<unsigned>(*std::max_element(all, all + count));
  });
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return emulator::exchange(value, [](const uint64_t* all, int count) {
    return static_cast<unsigned>(*std::min_element(all, all + count));
  });
}

inline int __reduce_add_sync(unsigned, int value) {
  return emulator::exchange(emulator::pack(value), [](const uint64_t* all, int count) {
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += emulator::unpack<int>(all[i]);
    return sum;
  });
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) { return emulator::shuffle(value, lane); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::shuffle(value, emulator::current->number % 32 ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int steps) {
  return emulator::shuffle(value, emulator::current->number % 32 - steps);
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline unsigned __float_as_uint(float value) { return emulator::unpack<unsigned>(emulator::pack(value)); }
inline float __uint_as_float(unsigned bits) { return emulator::unpack<float>(bits); }

inline int atomicAdd(int* place, int value) {
  const int before = *place;
  *place += value;
  return before;
}
inline int atomicMax(int* place, int value) {
  const int before = *place;
  *place = std::max(before, value);
  return before;
}
inline int atomicCAS(int* place, int expected, int value) {
  const int before = *place;
  if (before == expected) *place = value;
  return before;
}

namespace microspec {  // ptx.cuh

inline void copy_async_16(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) std::abort();
  std::memcpy(shared, global, 16);
}
inline void copy_async_4(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 4 != 0) std::abort();
  std::memcpy(shared, global, 4);
}
inline void end_copy_group() {}
inline void wait_for_earlier() {}
template <int LATEST>
void wait_for_all_but() {}

template <typename Unit>
Unit load_once(const Unit* source, uint64_t) { return *source; }
inline uint64_t evict_first() { return 0; }

}  // namespace microspec
