// The k best elements of a tile.
#pragma once

#include "row_tile.cuh"

namespace microspec {

// Scratch of block_topk in shared memory.
template <int WARPS, int CAPACITY>
struct TopkScratch {
  Ranked bests[WARPS][WARP];  // of each warp's threads, best first
  Ranked survivors[CAPACITY];
  Ranked threshold;
  int num_survivors;
};

// Leaves the best `count` of what the lanes bring in `bests`, best first, NOTHING where there are fewer.
__device__ __forceinline__ void sort_warp(Ranked mine, Ranked* bests, int count) {
  for (int i = 0; i < count; ++i) {
    const Ranked best = warp_best(mine);
    if (mine == best) mine = NOTHING;
    if (threadIdx.x % WARP == 0) bests[i] = best;
  }
}

// The k-th best of sorted lists of `length`; called by one warp. NOTHING if they hold fewer.
template <int WARPS>
__device__ __forceinline__ Ranked kth_best(const Ranked (&lists)[WARPS][WARP], int length, int k) {
  static_assert(WARPS <= WARP, "one lane for each list");
  const int lane = threadIdx.x % WARP;
  Ranked head = lane < WARPS ? lists[lane][0] : NOTHING, best = NOTHING;
  for (int i = 0, taken = 0; i < k; ++i) {
    best = warp_best(head);
    if (head == best && best != NOTHING) head = ++taken < length ? lists[lane][taken] : NOTHING;
  }
  return best;
}

// Puts the k best elements of `tile` and of `best[0 .. k)` into `best`, best first, NOTHING where there are
// fewer. Ends with a barrier. k <= CAPACITY / 2.
//
// The k-th best of what the threads' bests are at least is a lower bound of the k-th best element, and only k threads
// or so hold any that is not worse: those elements are listed and ranked by counting. Equal elements, as of columns
// that are masked out, do not make them more. If they are yet more than the list holds, the k-th best of the listed
// ones is a higher bound, and the next pass lists fewer: at least CAPACITY - k elements fall out in each.
template <int CAPACITY, typename Tile, int WARPS>
__device__ void block_topk(const Tile& tile, Ranked* best, int k, TopkScratch<WARPS, CAPACITY>& scratch) {
  const int thread = threadIdx.x;
  const int length = min(k, WARP);
  sort_warp(tile.at_least(), scratch.bests[thread / WARP], length);
  if (thread == 0) scratch.num_survivors = 0;
  __syncthreads();
  if (thread < WARP) {
    Ranked bound = kth_best(scratch.bests, length, k);
    if (bound < best[k - 1]) bound = best[k - 1];
    if (thread == 0) scratch.threshold = bound == NOTHING ? LOWEST : bound;
  }
  __syncthreads();

  while (true) {
    const Ranked threshold = scratch.threshold;
    const uint32_t threshold_key = key_of(threshold);
    const auto keep = [&](Ranked element) {
      if (element < threshold) return;
      const int place = atomicAdd(&scratch.num_survivors, 1);
      if (place < CAPACITY) scratch.survivors[place] = element;
    };
    if (tile.at_most() >= threshold) {
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
