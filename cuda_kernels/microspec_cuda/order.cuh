// One order for all selections: (value desc, index asc), NaN as -inf, -0 equal to +0.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace microspec {

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP = 32;

// A greater float has a greater key; 0 is below the key of -inf and stands for "no element".
__device__ __forceinline__ uint32_t order_key(float value) {
  value = fmaxf(value, -INFINITY);  // of a number and NaN, fmaxf returns the number
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 + 0 is +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Value and index in one word, the better element the greater; distinct for distinct indices.
using Ranked = unsigned long long;
constexpr Ranked NOTHING = 0;
constexpr Ranked LOWEST = Ranked{0x007fffffu} << 32;  // not better than any element: the key of -inf

__device__ __forceinline__ Ranked ranked(uint32_t key, uint32_t index) {
  return (static_cast<Ranked>(key) << 32) | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ uint32_t key_of(Ranked element) { return static_cast<uint32_t>(element >> 32); }
__device__ __forceinline__ uint32_t index_of(Ranked element) { return ~static_cast<uint32_t>(element); }

__device__ __forceinline__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(FULL_WARP, value); }

// The best element of a warp.
__device__ __forceinline__ Ranked warp_best(Ranked element) {
  const uint32_t key = warp_max(key_of(element));
  const uint32_t low = key_of(element) == key ? static_cast<uint32_t>(element) : 0u;
  return (static_cast<Ranked>(key) << 32) | warp_max(low);
}

__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(FULL_WARP, value); }

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}

__device__ __forceinline__ unsigned lanes_before() { return (1u << (threadIdx.x % WARP)) - 1; }

}  // namespace microspec
