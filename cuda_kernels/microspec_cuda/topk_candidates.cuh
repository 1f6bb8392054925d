// The k best columns of each row of [N, V] logits in one pass over them.
//
// A cluster of blocks shares a row (one block on chips without clusters). Each block brings its part of the row into
// shared memory, finds its k best and leaves them there, where the first block of the cluster reads and ranks them.
#pragma once

#include <cooperative_groups.h>

#include "block_topk.cuh"

namespace microspec::device::topk_candidates {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int LOADS = 8;  // of a thread, 16 bytes each, all in flight at once
constexpr int CAPACITY = 512;
constexpr int MAX_K = 64;
constexpr int MAX_CLUSTER = 8;  // what every chip with clusters allows

template <typename T>
using Tile = RowTile<T, LOADS, THREADS>;

template <typename T, bool VECTORISED>
__global__ void __launch_bounds__(THREADS, 2) kernel(const T* logits, int64_t* ids, int num_columns, int k) {
  extern __shared__ uint4 memory[];  // Tile<T>::BYTES
  __shared__ TopkScratch<WARPS, CAPACITY> scratch;
  __shared__ Ranked best[MAX_K];
  const int thread = threadIdx.x;
  const T* row = logits + static_cast<int64_t>(blockIdx.y) * num_columns;
  if (thread < k) best[thread] = NOTHING;

  for (int first = blockIdx.x * Tile<T>::COLUMNS; first < num_columns; first += gridDim.x * Tile<T>::COLUMNS) {
    Tile<T> tile;
    tile.template load<VECTORISED>(memory, row, first, min(num_columns, first + Tile<T>::COLUMNS));
    const Ranked best_of_warp = tile.best_of_warp();
    if (thread % WARP == 0) scratch.warp_bests[thread / WARP] = best_of_warp;
    block_topk<CAPACITY>(tile, best, k, scratch);
  }

  int64_t* row_ids = ids + static_cast<int64_t>(blockIdx.y) * k;
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    auto cluster = cooperative_groups::this_cluster();
    cluster.sync();  // every block's best are there
    if (blockIdx.x == 0) {
      const int num_listed = gridDim.x * k;
      for (int i = thread; i < num_listed; i += THREADS) {
        scratch.survivors[i] = cluster.map_shared_rank(best, i / k)[i % k];
      }
      __syncthreads();
      for (int i = thread; i < num_listed; i += THREADS) {
        const Ranked mine = scratch.survivors[i];
        int rank = 0;
        for (int j = 0; j < num_listed; ++j) rank += scratch.survivors[j] > mine;
        if (mine != NOTHING && rank < k) row_ids[rank] = index_of(mine);
      }
    }
    cluster.sync();  // no block leaves while its shared memory is read
    return;
  }
#endif
  __syncthreads();
  if (thread < k) row_ids[thread] = index_of(best[thread]);
}

static_assert(MAX_CLUSTER * MAX_K <= CAPACITY, "the bests of a cluster fit into the list");
static_assert(2 * MAX_K <= CAPACITY, "block_topk makes progress");

}  // namespace microspec::device::topk_candidates
