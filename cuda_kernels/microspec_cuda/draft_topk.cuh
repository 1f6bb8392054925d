// Log-softmax and the k best of each row of drafter logits: a block for each row.
#pragma once

#include "block_topk.cuh"

namespace microspec::device::draft_topk {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int MAX_COLUMNS = 4096;
constexpr int CAPACITY = 256;
constexpr int MAX_K = 64;

// The value of an element; -inf for NOTHING.
__device__ __forceinline__ float value_of(Ranked element) {
  return element == NOTHING ? -INFINITY : value_of_key(key_of(element));
}

// NaN as -inf, +inf as the largest finite number (half precision overflows): the row's sum stays a number.
template <typename T>
using Tile = RowTile<T, MAX_COLUMNS * sizeof(T) / 16 / THREADS, THREADS, true>;

template <typename T, bool VECTORISED>
__global__ void __launch_bounds__(THREADS)
    kernel(const T* logits, float* scores, int64_t* slots, int num_columns, int k) {
  __shared__ uint4 memory[Tile<T>::BYTES / 16];
  __shared__ TopkScratch<WARPS, CAPACITY> scratch;
  __shared__ Ranked best[MAX_K];
  __shared__ float tops[WARPS], sums[WARPS];
  const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
  if (thread < k) best[thread] = NOTHING;
  wait_for_earlier();

  Tile<T> tile;
  tile.template load<VECTORISED>(memory, logits + static_cast<int64_t>(blockIdx.x) * num_columns, 0, num_columns);

  // Each warp sums relative to its own maximum; the sums are brought to the row's maximum at the end.
  const float top = value_of_key(warp_max(order_key(tile.top())));
  float sum = 0.0f;
  if (top > -INFINITY) {
    tile.for_each([&](float value, int) { sum += expf(value - top); });
  }
  sum = warp_sum(sum);
  if (lane == 0) {
    tops[warp] = top;
    sums[warp] = sum;
  }
  block_topk<CAPACITY>(tile, best, k, scratch);

  if (warp > 0) return;
  const float lane_top = lane < WARPS ? tops[lane] : -INFINITY;
  const float row_top = value_of(best[0]);
  const float part = lane_top > -INFINITY ? sums[lane] * expf(lane_top - row_top) : 0.0f;
  const float log_sum = logf(warp_sum(part));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * k;
  for (int i = lane; i < k; i += WARP) {
    const float logit = value_of(best[i]);
    scores[first + i] = logit > -INFINITY ? (logit - row_top) - log_sum : -INFINITY;
    slots[first + i] = index_of(best[i]);
  }
}

static_assert(2 * MAX_K <= CAPACITY, "block_topk makes progress");

}  // namespace microspec::device::draft_topk
