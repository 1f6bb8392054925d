// The k best columns of each row of [N, V] logits in one pass over them.
//
// A cluster of blocks shares a row (one block on chips without clusters). Each block brings its part of the row into
// shared memory, finds its k best and sends them to the first block of the cluster, which ranks them.
#pragma once

#include <cooperative_groups.h>

#include <utility>

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
#if __CUDA_ARCH__ >= 900
  __shared__ Ranked arrived[MAX_CLUSTER * MAX_K];  // in the first block: the bests of all
  auto cluster = cooperative_groups::this_cluster();
  auto all_started = cluster.barrier_arrive();  // a block's memory can be written from when it runs
#endif
  wait_for_earlier();
  const T* row = logits + static_cast<int64_t>(blockIdx.y) * num_columns;
  if (thread < k) best[thread] = NOTHING;

  for (int first = blockIdx.x * Tile<T>::COLUMNS; first < num_columns; first += gridDim.x * Tile<T>::COLUMNS) {
    Tile<T> tile;
    tile.template load<VECTORISED>(memory, row, first, min(num_columns, first + Tile<T>::COLUMNS));
    block_topk<CAPACITY>(tile, best, k, scratch);
  }

  int64_t* row_ids = ids + static_cast<int64_t>(blockIdx.y) * k;
#if __CUDA_ARCH__ >= 900
  cluster.barrier_wait(std::move(all_started));
  if (gridDim.x > 1) {
    if (thread < k) cluster.map_shared_rank(arrived, 0)[blockIdx.x * k + thread] = best[thread];
    cluster.sync();
    if (blockIdx.x > 0) return;
    const int num_arrived = gridDim.x * k;
    for (int i = thread; i < num_arrived; i += THREADS) {
      const Ranked mine = arrived[i];
      int rank = 0;
      for (int j = 0; j < num_arrived; ++j) rank += arrived[j] > mine;
      if (mine != NOTHING && rank < k) row_ids[rank] = index_of(mine);
    }
    return;
  }
#endif
  __syncthreads();
  if (thread < k) row_ids[thread] = index_of(best[thread]);
}

static_assert(2 * MAX_K <= CAPACITY, "block_topk makes progress");

}  // namespace microspec::device::topk_candidates
