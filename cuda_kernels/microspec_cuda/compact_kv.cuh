// Moves the KV rows of an accepted path together, in all buffers of a launch.
//
// A thread owns a few bytes of the head dimension of one head: it reads them in all rows of the path before it
// writes any, so that no row is lost and no barrier is needed.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace microspec::device::compact_kv {

constexpr int THREADS = 128;
constexpr int MAX_PATH = 16;
constexpr int MAX_BUFFERS = 448;  // pointers that fit into the 4 KB of a kernel's arguments

struct Buffers {
  void* data[MAX_BUFFERS];
};

template <typename Unit>
__global__ void __launch_bounds__(THREADS)
    kernel(const __grid_constant__ Buffers buffers, const int64_t* path, const int64_t* start, int path_length,
           int num_heads, int64_t capacity, int units_per_row) {
  wait_for_earlier();
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= num_heads * units_per_row) return;
  const int head = column / units_per_row, unit = column % units_per_row;
  Unit* rows = static_cast<Unit*>(buffers.data[blockIdx.y]) + head * capacity * units_per_row + unit;
  const int64_t first = *start;

  Unit values[MAX_PATH];
  int64_t sources[MAX_PATH];
#pragma unroll
  for (int i = 0; i < MAX_PATH; ++i) {
    sources[i] = i < path_length && first + i < capacity ? first + path[i] : -1;
    if (sources[i] >= capacity || sources[i] == first + i) sources[i] = -1;  // nowhere, or there already
    if (sources[i] >= 0) values[i] = rows[sources[i] * units_per_row];
  }
#pragma unroll
  for (int i = 0; i < MAX_PATH; ++i) {
    if (sources[i] >= 0) rows[(first + i) * units_per_row] = values[i];
  }
}

}  // namespace microspec::device::compact_kv
