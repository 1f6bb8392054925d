// The k best elements of a tile.
#pragma once

#include "row_tile.cuh"

namespace microspec {

// k-th best of the warps' bests: at least k elements are not worse, and few others are.
//
// Called by one warp. NOTHING if fewer than k warps have an element.
template <int WARPS>
__device__ __forceinline__ Ranked kth_best(const Ranked* warp_bests, int k) {
  static_assert(WARPS <= WARP, "one lane for each warp's best");
  const int lane = threadIdx.x % WARP;
  const Ranked mine = lane < WARPS ? warp_bests[lane] : NOTHING;
  int rank = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) rank += warp_bests[w] > mine;
  return warp_best(rank == k - 1 ? mine : NOTHING);
}

// Scratch of block_topk in shared memory.
template <int WARPS, int CAPACITY>
struct TopkScratch {
  Ranked warp_bests[WARPS];
  Ranked survivors[CAPACITY];
  Ranked threshold;
  int num_survivors;
};

// Puts the k best elements of `tile` and of `best[0 .. k)` into `best`, best first, NOTHING where there are
// fewer. Ends with a barrier. k <= CAPACITY / 2.
//
// Elements not worse than a lower bound of the k-th best are listed and ranked by counting. If they are more
// than the list holds, the k-th best of the listed ones is a higher bound, and the next pass lists fewer: at
// least CAPACITY - k elements fall out in each. Random data takes one pass.
template <int CAPACITY, typename Tile, int WARPS>
__device__ void block_topk(const Tile& tile, Ranked* best, int k, TopkScratch<WARPS, CAPACITY>& scratch) {
  const int thread = threadIdx.x;
  // scratch.warp_bests has been written by every warp; this barrier shows them to the first one.
  __syncthreads();
  if (thread < WARP) {
    Ranked bound = kth_best<WARPS>(scratch.warp_bests, k);
    if (bound < best[k - 1]) bound = best[k - 1];
    if (thread == 0) scratch.threshold = bound == NOTHING ? LOWEST : bound;
  }
  if (thread == 0) scratch.num_survivors = 0;
  __syncthreads();

  while (true) {
    const Ranked threshold = scratch.threshold;
    const uint32_t threshold_key = key_of(threshold);
    const auto keep = [&](Ranked element) {
      if (element < threshold) return;
      const int place = atomicAdd(&scratch.num_survivors, 1);
      if (place < CAPACITY) scratch.survivors[place] = element;
    };
    if (tile.has_any() && order_key(tile.top()) >= threshold_key) {
      const float lowest = value_of_key(threshold_key);
      tile.for_each([&](float value, int column) {
        if (value >= lowest && tile.has(column)) keep(ranked(order_key(value), column));
      });
    }
    for (int i = thread; i < k; i += WARPS * WARP) {
      if (best[i] != NOTHING) keep(best[i]);
    }
    __syncthreads();

    const int num_survivors = scratch.num_survivors;
    const int num_listed = min(num_survivors, CAPACITY);
    const bool is_last = num_survivors <= CAPACITY;
    for (int i = thread; i < num_listed; i += WARPS * WARP) {
      const Ranked mine = scratch.survivors[i];
      int rank = 0;
      for (int j = 0; j < num_listed && rank < k; ++j) rank += scratch.survivors[j] > mine;
      if (is_last) {
        if (rank < k) best[rank] = mine;
      } else if (rank == k - 1) {
        scratch.threshold = mine;
      }
    }
    if (is_last) {
      for (int i = num_listed + thread; i < k; i += WARPS * WARP) best[i] = NOTHING;
    }
    __syncthreads();
    if (is_last) return;
    if (thread == 0) scratch.num_survivors = 0;
    __syncthreads();
  }
}

}  // namespace microspec
