// A stretch of a row in shared memory, brought there by asynchronous copies that are all in flight at once.
//
// Every thread reads only what it copied itself, so that no barrier is needed; and values that lie in shared memory
// cost no registers, of which 64 elements a thread would take too many.
#pragma once

#include <cfloat>
#include <type_traits>

#include "order.cuh"
#include "ptx.cuh"

namespace microspec {

// FINITE: +inf counts as the largest finite number.
template <typename T, int LOADS, int THREADS, bool FINITE = false>
class RowTile {
 public:
  static constexpr int VECTOR = 16 / sizeof(T);  // elements of a 16-byte load
  static constexpr int COLUMNS = LOADS * VECTOR * THREADS;
  static constexpr int BYTES = LOADS * THREADS * 16;

  // Columns first .. last - 1 of a row, into `memory` of BYTES bytes. VECTORISED needs a row that starts at a
  // multiple of 16 bytes and a whole number of vectors.
  template <bool VECTORISED>
  __device__ __forceinline__ void load(uint4* memory, const T* row, int first, int last) {
    memory_ = memory + threadIdx.x;
    begin_ = first + threadIdx.x * VECTOR;
    end_ = last;
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
      const int column = begin_ + u * THREADS * VECTOR;
      uint4* target = memory_ + u * THREADS;
      if (VECTORISED && column < end_) {
        copy_async_16(target, row + column);
      } else {
        T* elements = reinterpret_cast<T*>(target);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          elements[v] = !VECTORISED && column + v < end_ ? row[column + v] : T(-INFINITY);
        }
      }
      end_copy_group();
    }
    top_ = -INFINITY;
    top_begin_ = begin_;
    find_top<0>();
  }

  // Whether this thread has an element.
  __device__ __forceinline__ bool has_any() const { return begin_ < end_; }

  // `visit(value, column)` for each element of this thread in ascending columns, and for places behind the end,
  // whose value is -inf. NaN is -inf too.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
#pragma unroll 2
    for (int u = 0; u < LOADS; ++u) {
      const uint4 data = memory_[u * THREADS];
      const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) visit(value_of_element(words, v), begin_ + u * THREADS * VECTOR + v);
    }
  }

  __device__ __forceinline__ bool has(int column) const { return column < end_; }

  // The greatest value of this thread's elements; -inf without any.
  __device__ __forceinline__ float top() const { return top_; }

  // The best element of this thread is not worse than `at_least` and not better than `at_most`: its value is known,
  // its column up to the few that one load brings. NOTHING without any.
  __device__ __forceinline__ Ranked at_least() const {
    return has_any() ? ranked(order_key(top_), top_begin_ + VECTOR - 1) : NOTHING;
  }
  __device__ __forceinline__ Ranked at_most() const {
    return has_any() ? ranked(order_key(top_), top_begin_) : NOTHING;
  }

 private:
  // Takes in the loads from U on as they arrive, the later ones still being under way.
  template <int U>
  __device__ __forceinline__ void find_top() {
    if constexpr (U < LOADS) {
      wait_for_all_but<LOADS - 1 - U>();
      const uint4 data = memory_[U * THREADS];
      const uint32_t words[4] = {data.x, data.y, data.z, data.w};
      float top = -INFINITY;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) top = fmaxf(top, value_of_element(words, v));
      if (top > top_) {
        top_ = top;
        top_begin_ = begin_ + U * THREADS * VECTOR;
      }
      find_top<U + 1>();
    }
  }

  __device__ __forceinline__ static float value_of_element(const uint32_t (&words)[4], int v) {
    float value;
    if constexpr (sizeof(T) == 4) {
      value = __uint_as_float(words[v]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      value = __uint_as_float(v % 2 ? words[v / 2] & 0xffff0000u : words[v / 2] << 16);
    } else {
      const auto half = static_cast<unsigned short>(v % 2 ? words[v / 2] >> 16 : words[v / 2] & 0xffffu);
      value = __half2float(__ushort_as_half(half));
    }
    value = fmaxf(value, -INFINITY);
    return FINITE ? fminf(value, FLT_MAX) : value;
  }

  uint4* memory_;
  int begin_, end_;
  float top_;
  int top_begin_;  // first column of the load that brought it
};

}  // namespace microspec
