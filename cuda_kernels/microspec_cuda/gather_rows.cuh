// Copies `count` rows of a matrix into given slots of another; the count is read on the device.
//
// A block is a patch of threadIdx.x along a row and threadIdx.y over entries; each thread has IN_FLIGHT loads under
// way before its first store. The grid covers all M entries; blocks behind the count leave at once.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace microspec::device::gather_rows {

constexpr int THREADS = 128;
constexpr int IN_FLIGHT = 4;

template <typename Unit, typename Index>
__global__ void __launch_bounds__(THREADS)
    kernel(Unit* out, const Unit* weight, const Index* rows, const Index* slots, const int* count,
           int num_entries, int units_per_row, int64_t num_rows, int64_t num_slots) {
  wait_for_earlier();
  const int entry = blockIdx.x * blockDim.y + threadIdx.y;
  if (entry >= num_entries) return;
  const int limit = *count;
  const int64_t row = rows[entry], slot = slots[entry];  // asked for together with the count
  if (entry >= limit || row < 0 || row >= num_rows || slot < 0 || slot >= num_slots) return;
  const Unit* source = weight + row * units_per_row;
  Unit* target = out + slot * units_per_row;
  const int step = blockDim.x;
  const uint64_t policy = evict_first();  // the matrix is far larger than the L2, and what is copied is read soon
  for (int first = blockIdx.y * step * IN_FLIGHT + threadIdx.x; first < units_per_row;
       first += gridDim.y * step * IN_FLIGHT) {
    Unit values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (first + i * step < units_per_row) values[i] = load_once(source + first + i * step, policy);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (first + i * step < units_per_row) target[first + i * step] = values[i];
    }
  }
}

}  // namespace microspec::device::gather_rows
