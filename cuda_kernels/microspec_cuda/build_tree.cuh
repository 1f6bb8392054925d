// Rerank the candidates of a drafting round and keep the best as a tree. One block.
#pragma once

#include "bitmap.cuh"
#include "ptx.cuh"

namespace microspec::device::build_tree {

constexpr int MAX_NODES = 64;

// ITEMS candidates a thread, at most THREADS * ITEMS in all; candidate i is item i / THREADS of thread i % THREADS.
template <int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    kernel(const float* scores, const int64_t* tokens, const int64_t* parents, const int64_t* root,
           int num_candidates, int num_nodes, int64_t* node_tokens, int64_t* node_parents, int64_t* node_depths,
           int64_t* node_ancestors) {
  constexpr int WARPS = THREADS / WARP;
  constexpr int NUM_WORDS = WARPS * ITEMS;
  __shared__ unsigned words[NUM_WORDS];
  __shared__ int before[NUM_WORDS];
  __shared__ int total;
  __shared__ uint8_t node_of[THREADS * ITEMS];  // 0, the root, for candidates that are not kept
  __shared__ int candidate_of[MAX_NODES];
  __shared__ int parent_of[MAX_NODES];
  const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
  const int num_kept = num_nodes - 1;
  wait_for_earlier();

  uint32_t keys[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int i = item * THREADS + thread;
    keys[item] = i < num_candidates ? order_key(scores[i]) : 0u;
    node_of[i] = 0;
  }

  // The greatest key that num_kept candidates reach, bit by bit; fewer bits if exactly num_kept reach it sooner.
  uint32_t threshold = 0;
  bool is_exact = false;
  if (num_kept > 0) {
    for (uint32_t bit = 0x80000000u; bit != 0 && !is_exact; bit >>= 1) {
      const uint32_t attempt = threshold | bit;
      int reached = 0;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) reached += __syncthreads_count(keys[item] >= attempt);
      if (reached >= num_kept) threshold = attempt;
      is_exact = reached == num_kept;
    }
  }

  // Above the threshold all are kept, and of its equals the first ones.
  bool is_kept[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    is_kept[item] = num_kept > 0 && (is_exact ? keys[item] >= threshold : keys[item] > threshold);
  }
  if (!is_exact && num_kept > 0) {
    int num_above = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) num_above += __syncthreads_count(is_kept[item]);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const unsigned word = __ballot_sync(FULL_WARP, keys[item] == threshold);
      if (lane == 0) words[item * WARPS + warp] = word;
    }
    __syncthreads();
    rank_words(words, NUM_WORDS, before, &total);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int word = item * WARPS + warp;
      const int rank = rank_of(words, before, word);
      if (keys[item] == threshold && rank < num_kept - num_above) is_kept[item] = true;
    }
    __syncthreads();
  }

  // Node numbers in ascending order of the candidates.
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const unsigned word = __ballot_sync(FULL_WARP, is_kept[item]);
    if (lane == 0) words[item * WARPS + warp] = word;
  }
  __syncthreads();
  rank_words(words, NUM_WORDS, before, &total);
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    if (is_kept[item]) {
      const int word = item * WARPS + warp;
      const int node = 1 + rank_of(words, before, word);
      node_of[item * THREADS + thread] = static_cast<uint8_t>(node);
      candidate_of[node] = item * THREADS + thread;
    }
  }
  __syncthreads();

  if (thread < num_nodes) {
    int parent = -1;
    int64_t token = root[0];
    if (thread > 0) {
      const int candidate = candidate_of[thread];
      const int64_t flat = parents[candidate];
      parent = flat >= 0 && flat < num_candidates ? node_of[flat] : 0;
      token = scores[candidate] > -INFINITY ? tokens[candidate] : -1;
    }
    parent_of[thread] = parent;
    node_tokens[thread] = token;
    node_parents[thread] = parent;
  }
  __syncthreads();

  // Each node walks up; a parent has a smaller number, so every walk ends.
  if (thread < num_nodes) {
    uint64_t ancestors = uint64_t{1} << thread;
    int depth = 0;
    for (int node = thread, parent = parent_of[node]; parent >= 0 && parent < node; parent = parent_of[node]) {
      node = parent;
      ancestors |= uint64_t{1} << node;
      ++depth;
    }
    node_depths[thread] = depth;
    node_ancestors[thread] = static_cast<int64_t>(ancestors);
  }
}

}  // namespace microspec::device::build_tree
