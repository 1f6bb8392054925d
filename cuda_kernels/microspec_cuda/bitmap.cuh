#pragma once

#include "order.cuh"

namespace microspec {

// Ranks in a bitmap in shared memory: how many bits are set before each word.
//
// `before` [num_words] gets the exclusive sums of the population counts of `words`, *total their sum. Work of the
// first warp; ends with a barrier.
__device__ inline void rank_words(const unsigned* words, int num_words, int* before, int* total) {
  if (threadIdx.x < WARP) {
    int sum = 0;
    for (int first = 0; first < num_words; first += WARP) {
      const int i = first + threadIdx.x;
      const int count = i < num_words ? __popc(words[i]) : 0;
      int inclusive = count;
      for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, inclusive, step);
        if (threadIdx.x >= step) inclusive += other;
      }
      if (i < num_words) before[i] = sum + inclusive - count;
      sum += __shfl_sync(FULL_WARP, inclusive, WARP - 1);
    }
    if (threadIdx.x == 0) *total = sum;
  }
  __syncthreads();
}

// Rank of bit (word, lane) among the set bits.
__device__ __forceinline__ int rank_of(const unsigned* words, const int* before, int word) {
  return before[word] + __popc(words[word] & lanes_before());
}

}  // namespace microspec
