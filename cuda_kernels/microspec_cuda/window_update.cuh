// Appends a round's ids to the stream and brings the active vocabulary up to date. One block.
//
// The window's slots and a table of the call's ids lie in shared memory. All decisions are functions of positions
// and counts, which no thread order can change; ranks are sums over the threads before. The block is bound by its
// instructions and barriers, not by memory: a thread owns four slots at a time, and work that only some need is
// skipped by whole warps.
#pragma once

#include "order.cuh"
#include "ptx.cuh"

namespace microspec::device::window_update {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int MAX_CANDIDATES = THREADS;  // one each
constexpr int MAX_SLOTS = 8192;
constexpr int OWNED = 4;  // slots of a thread, one behind the other
constexpr int MAX_STRETCHES = MAX_SLOTS / (OWNED * THREADS);
constexpr int TABLE = 2 * MAX_CANDIDATES;
constexpr int BIN_BITS = 13;
constexpr int BINS = 1 << BIN_BITS;
constexpr int OWN_BINS = BINS / THREADS;

static_assert(WARPS == WARP, "one lane for each warp's count");
static_assert(OWN_BINS % 4 == 0, "a thread clears and reads its bins by 16 bytes");

struct Window {
  int* slot_of;       // [vocab_size]
  int* token_of;      // [num_slots]
  int* usage;         // [num_slots]
  int* ring;          // [ring_length], stream only
  int64_t* clock;     // [1]
  const bool* pinned; // [num_slots]
  int vocab_size, num_slots;
  unsigned ring_length;
};

struct Changes {
  int64_t* rows;   // [num_candidates]
  int64_t* slots;  // [num_candidates]
  int* counts;     // [2]
};

// The ids of a call, by open addressing: each with the last thread that brings it and how often it is kept.
struct Table {
  int ids[TABLE];
  int last[TABLE];
  int occurrences[TABLE];

  __device__ int find_or_insert(int id, unsigned size) {
    unsigned place = (static_cast<unsigned>(id) * 2654435761u >> 16) & (size - 1);
    while (true) {
      const int before = atomicCAS(&ids[place], -1, id);
      if (before == -1 || before == id) return place;
      place = (place + 1) & (size - 1);
    }
  }
};

struct alignas(16) Scratch {
  Table table;
  alignas(16) int histogram[BINS];
  int list[MAX_CANDIDATES];  // of positions, later of free slots
  int entries[WARPS], entering[WARPS], free[MAX_STRETCHES][WARPS], totals[WARPS];  // counts of each warp
  int oldest[WARPS];  // position that each warp has seen
  int bin, num_in_bin, nth, selected, num_listed;  // of the selection
  int num_evicted;
};

// Places of the table for so many candidates: a power of two, half of which stay free.
__host__ inline int table_size(int64_t num_candidates) {
  int size = 1;
  while (size < 2 * num_candidates) size *= 2;
  return size;
}

__host__ __device__ constexpr int rounded_up(int num_slots) { return (num_slots + 15) / 16 * 16; }

static_assert(sizeof(Scratch) <= 64 * 1024, "what `supports` reckons with");

// Dynamic shared memory: Scratch, then usage and token of the slots, then whether they are pinned, in bytes.
__host__ inline size_t shared_bytes(int num_slots) { return sizeof(Scratch) + 9 * rounded_up(num_slots); }

// Four slots that a thread owns, read from shared memory at once.
struct Owned {
  alignas(16) int usage[OWNED];
  alignas(16) int token[OWNED];
  unsigned pinned;  // a byte each

  __device__ __forceinline__ Owned(const int* all_usage, const int* token_of, const unsigned char* all_pinned, int i) {
    *reinterpret_cast<int4*>(usage) = *reinterpret_cast<const int4*>(all_usage + i);
    *reinterpret_cast<int4*>(token) = *reinterpret_cast<const int4*>(token_of + i);
    pinned = *reinterpret_cast<const unsigned*>(all_pinned + i);
  }
  __device__ __forceinline__ bool is_pinned(int j) const { return pinned >> 8 * j & 255; }
  // Whether it holds an id that may leave.
  __device__ __forceinline__ bool is_loose(int j) const { return token[j] >= 0 && !is_pinned(j); }
};

struct Ranking {
  int before, total;
};

// Sums of the warps' counts: those of the warps before this one, and all. Called by whole warps.
__device__ __forceinline__ Ranking ranking_of(const int (&counts)[WARPS]) {
  const int lane = threadIdx.x % WARP, count = counts[lane];
  return {warp_sum(lane < threadIdx.x / WARP ? count : 0), warp_sum(count)};
}

// Sum of the counts of the lanes up to this one.
__device__ __forceinline__ int sum_up_to_lane(int count) {
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(FULL_WARP, count, step);
    if (threadIdx.x % WARP >= step) count += other;
  }
  return count;
}

__device__ __forceinline__ void clear_own_bins(Scratch& s) {
#pragma unroll
  for (int i = 0; i < OWN_BINS; i += 4) {
    *reinterpret_cast<int4*>(s.histogram + OWN_BINS * threadIdx.x + i) = int4{0, 0, 0, 0};
  }
}

// The n-th smallest, from 1, of the positions that `for_each` visits; all are >= first and < bound.
//
// A histogram says in which bin it lies. The bin's positions, few as they differ, are listed and ranked by counting;
// a bin that is too full is divided again. histogram and num_listed are 0 before.
template <typename ForEach>
__device__ int nth_smallest(Scratch& s, int n, int first, int64_t bound, ForEach for_each) {
  const int thread = threadIdx.x, warp = thread / WARP;
  int shift = 0;
  while ((bound - 1 - first) >> shift >= BINS) ++shift;
  while (true) {
    for_each([&](int position) {
      const int bin = (position - first) >> shift;
      if (position >= first && bin < BINS) atomicAdd(&s.histogram[bin], 1);
    });
    __syncthreads();
    alignas(16) int counts[OWN_BINS];
    int own = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(s.histogram + OWN_BINS * thread + i);
      *reinterpret_cast<int4*>(counts + i) = four;
      own += four.x + four.y + four.z + four.w;
    }
    const int total = warp_sum(own);
    if (thread % WARP == 0) s.totals[warp] = total;
    __syncthreads();
    const int before = ranking_of(s.totals).before;
    if (before < n && n <= before + total) {  // one warp holds the bin
      int left = n - (before + sum_up_to_lane(own) - own);
      if (left >= 1 && left <= own) {  // one thread does
#pragma unroll
        for (int i = 0; i < OWN_BINS; ++i) {
          if (left >= 1 && left <= counts[i]) {
            s.bin = OWN_BINS * thread + i;
            s.num_in_bin = counts[i];
            s.nth = left;
          }
          left -= counts[i];
        }
      }
    }
    clear_own_bins(s);
    __syncthreads();
    first += s.bin << shift;
    n = s.nth;
    if (shift == 0) return first;
    if (s.num_in_bin <= MAX_CANDIDATES) break;
    shift = max(0, shift - BIN_BITS);
  }
  for_each([&](int position) {
    if (position >= first && position - first < 1 << shift) s.list[atomicAdd(&s.num_listed, 1)] = position;
  });
  __syncthreads();
  if (thread < s.num_listed) {
    const int mine = s.list[thread];
    int less = 0, equal = 0;
    for (int i = 0; i < s.num_listed; ++i) {
      less += s.list[i] < mine;
      equal += s.list[i] == mine;
    }
    if (less < n && n <= less + equal) s.selected = mine;
  }
  __syncthreads();
  return s.selected;
}

// VECTORISED: num_slots is a multiple of 16, and the arrays over slots start at multiples of 16 bytes.
template <bool STREAM, bool VECTORISED>
__global__ void __launch_bounds__(THREADS, 1)
    kernel(Window window, const int64_t* candidates, int num_candidates, int num_places, Changes changes) {
  extern __shared__ __align__(16) unsigned char memory[];
  Scratch& s = *reinterpret_cast<Scratch*>(memory);
  const int num_slots = window.num_slots, num_padded = rounded_up(num_slots);
  int* usage = reinterpret_cast<int*>(memory + sizeof(Scratch));
  int* token_of = usage + num_padded;
  unsigned char* pinned = reinterpret_cast<unsigned char*>(token_of + num_padded);
  const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;

  for (int i = thread; i < num_places; i += THREADS) {
    s.table.ids[i] = s.table.last[i] = -1;
    s.table.occurrences[i] = 0;
  }
  if (!STREAM) clear_own_bins(s);
  if (thread == 0) s.num_evicted = s.num_listed = 0;
  wait_for_earlier();

  // Everything that the call reads is asked for at once. Slots behind the last one are neither free nor ever left.
  const int64_t candidate = thread < num_candidates ? candidates[thread] : -1;
  const int64_t clock = *window.clock;
  for (int i = OWNED * thread; i < num_padded; i += OWNED * THREADS) {
    if (VECTORISED) {
      copy_async_16(usage + i, window.usage + i);
      copy_async_16(token_of + i, window.token_of + i);
      copy_async_4(pinned + i, window.pinned + i);
    } else {
      for (int j = i; j < i + OWNED; ++j) {
        usage[j] = j < num_slots ? window.usage[j] : 0;
        token_of[j] = j < num_slots ? window.token_of[j] : 0;
        pinned[j] = j < num_slots ? window.pinned[j] : 1;
      }
    }
  }
  end_copy_group();
  const bool is_entry = candidate >= 0 && candidate < window.vocab_size;
  const int id = static_cast<int>(candidate);
  int slot = is_entry ? window.slot_of[id] : -1;
  const bool has_ring = STREAM && window.ring_length > 0;
  const unsigned ring_start = !has_ring                ? 0
                              : clock <= 0x7fffffffll ? static_cast<unsigned>(clock) % window.ring_length
                                                      : static_cast<unsigned>(clock % window.ring_length);
  const auto cell_of = [&](int place) { return window.ring + (ring_start + place) % window.ring_length; };
  const int leaving = has_ring && thread < num_candidates ? *cell_of(thread) : -1;
  __syncthreads();  // the table is empty

  const unsigned entries = __ballot_sync(FULL_WARP, is_entry);
  if (lane == 0) s.entries[warp] = __popc(entries);
  int in_table = 0;
  if (is_entry) {
    in_table = s.table.find_or_insert(id, num_places);
    atomicMax(&s.table.last[in_table], thread);
  }
  const int leaving_slot = leaving >= 0 ? window.slot_of[leaving] : -1;
  wait_for_all_but<0>();
  if (!STREAM) {
    int num_free = 0;
    unsigned oldest = 0x7fffffff;
    for (int i = OWNED * thread; i < num_padded; i += OWNED * THREADS) {
      const Owned slots(usage, token_of, pinned, i);
#pragma unroll
      for (int j = 0; j < OWNED; ++j) {
        num_free += slots.token[j] < 0;
        if (slots.is_loose(j)) oldest = min(oldest, static_cast<unsigned>(slots.usage[j]));
      }
    }
    num_free = warp_sum(num_free);
    oldest = __reduce_min_sync(FULL_WARP, oldest);
    if (lane == 0) {
      s.free[0][warp] = num_free;
      s.oldest[warp] = static_cast<int>(oldest);
    }
  }
  __syncthreads();

  // Place of each entry in the call, the last one of each id, and which entries stay in the ring.
  const Ranking entry = ranking_of(s.entries);
  const int place = entry.before + __popc(entries & lanes_before());
  const int num_dropped = STREAM ? entry.total - static_cast<int>(window.ring_length) : 0;
  const bool is_kept = is_entry && place >= num_dropped;
  const bool is_last = is_entry && s.table.last[in_table] == thread;
  const bool is_new = is_last && slot < 0;
  const int position = static_cast<int>(clock + place);
  if (thread == 0) *window.clock = clock + entry.total;
  if (STREAM) {
    if (is_kept) {
      atomicAdd(&s.table.occurrences[in_table], 1);
      if (slot >= 0) atomicAdd(&usage[slot], 1);
      *cell_of(place) = id;
    }
    // This thread has read the cell of the place that has its own number.
    if (leaving_slot >= 0 && thread >= num_dropped && thread < entry.total) atomicAdd(&usage[leaving_slot], -1);
  } else {
    if (is_last && slot >= 0) usage[slot] = position;
    const unsigned new_word = __ballot_sync(FULL_WARP, is_new);
    if (lane == 0) s.entering[warp] = __popc(new_word);
  }
  __syncthreads();

  int limit = -1;  // lru: unpinned ids last seen up to here have no room
  if (!STREAM) {
    const int excess = ranking_of(s.entering).total - ranking_of(s.free[0]).total;
    if (excess > 0) {
      const unsigned oldest = __reduce_min_sync(FULL_WARP, static_cast<unsigned>(s.oldest[lane]));
      const int first = min(static_cast<int64_t>(oldest), clock);  // what enters comes behind the clock
      limit = nth_smallest(s, excess, first, clock + entry.total, [&](auto&& visit) {
        if (is_new) visit(position);
        for (int i = OWNED * thread; i < num_padded; i += OWNED * THREADS) {
          const Owned slots(usage, token_of, pinned, i);
#pragma unroll
          for (int j = 0; j < OWNED; ++j) {
            if (slots.is_loose(j)) visit(slots.usage[j]);
          }
        }
      });
    }
    __syncthreads();  // the counts have been read
  }
  const bool enters = is_new && (STREAM ? is_kept : position > limit);

  // Free slots, those of the ids that leave included: a bit for each that the thread owns.
  unsigned free_slots = 0;
  int num_leaving = 0;
  for (int i = OWNED * thread, stretch = 0; stretch < MAX_STRETCHES; i += OWNED * THREADS, ++stretch) {
    unsigned is_free = 0;
    if (i < num_padded) {
      Owned slots(usage, token_of, pinned, i);
#pragma unroll
      for (int j = 0; j < OWNED; ++j) {
        const bool leaves = slots.is_loose(j) && (STREAM ? slots.usage[j] == 0 : slots.usage[j] <= limit);
        is_free |= static_cast<unsigned>(slots.token[j] < 0 || leaves) << j;
        if (leaves) {
          window.slot_of[slots.token[j]] = -1;
          window.token_of[i + j] = -1;
          slots.usage[j] = 0;
          ++num_leaving;
        }
        if (!VECTORISED && i + j < num_slots) window.usage[i + j] = slots.usage[j];
      }
      if (VECTORISED) *reinterpret_cast<int4*>(window.usage + i) = *reinterpret_cast<const int4*>(slots.usage);
    }
    const int num_free = warp_sum(__popc(is_free));
    if (lane == 0) s.free[stretch][warp] = num_free;
    free_slots |= is_free << (OWNED * stretch);
  }
  num_leaving = warp_sum(num_leaving);
  if (lane == 0 && num_leaving > 0) atomicAdd(&s.num_evicted, num_leaving);
  const unsigned entering_word = __ballot_sync(FULL_WARP, enters);
  if (lane == 0) s.entering[warp] = __popc(entering_word);
  __syncthreads();

  // The ids that enter take the free slots in ascending order.
  const Ranking entering = ranking_of(s.entering);
  int num_free = 0;
  for (int stretch = 0; stretch < MAX_STRETCHES; ++stretch) {
    const Ranking ranking = ranking_of(s.free[stretch]);
    if (num_free + ranking.before < entering.total) {
      const unsigned is_free = free_slots >> (OWNED * stretch) & ((1u << OWNED) - 1);
      int rank = num_free + ranking.before + sum_up_to_lane(__popc(is_free)) - __popc(is_free);
      for (int j = 0; j < OWNED; ++j) {
        if (is_free >> j & 1) {
          if (rank < entering.total) s.list[rank] = OWNED * (stretch * THREADS + thread) + j;
          ++rank;
        }
      }
    }
    num_free += ranking.total;
  }
  const int num_entering = min(entering.total, num_free);
  __syncthreads();
  if (enters) {
    const int rank = entering.before + __popc(entering_word & lanes_before());
    if (rank < num_entering) {
      slot = s.list[rank];
      changes.rows[rank] = id;
      changes.slots[rank] = slot;
      window.slot_of[id] = slot;
      window.token_of[slot] = id;
      window.usage[slot] = STREAM ? s.table.occurrences[in_table] : position;
    }
  }
  if (thread >= num_entering && thread < num_candidates) changes.rows[thread] = changes.slots[thread] = -1;
  if (thread == 0) {
    changes.counts[0] = num_entering;
    changes.counts[1] = s.num_evicted;
  }
}

}  // namespace microspec::device::window_update
