// Appends a round's ids to the stream and brings the active vocabulary up to date. One block.
//
// The window's slots and a table of the call's ids lie in shared memory. All decisions are functions of positions
// and counts, which no thread order can change; ranks come from bitmaps.
#pragma once

#include "bitmap.cuh"

namespace microspec::device::window_update {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int MAX_CANDIDATES = THREADS;  // one each
constexpr int MAX_SLOTS = 8192;
constexpr int TABLE = 2 * MAX_CANDIDATES;

struct Window {
  int* slot_of;       // [vocab_size]
  int* token_of;      // [num_slots]
  int* usage;         // [num_slots]
  int* ring;          // [ring_length], stream only
  int64_t* clock;     // [1]
  const bool* pinned; // [num_slots]
  int vocab_size, num_slots, ring_length;
};

struct Changes {
  int64_t* rows;   // [num_candidates]
  int64_t* slots;  // [num_candidates]
  int* counts;     // [2]
};

// The ids of a call, by open addressing: each with its last place among the entries and how often it is kept.
struct Table {
  int ids[TABLE];
  int last[TABLE];
  int occurrences[TABLE];

  __device__ int find_or_insert(int id) {
    unsigned place = static_cast<unsigned>(id) * 2654435761u % TABLE;
    while (true) {
      const int before = atomicCAS(&ids[place], -1, id);
      if (before == -1 || before == id) return place;
      place = (place + 1) % TABLE;
    }
  }
};

struct Scratch {
  Table table;
  unsigned entry_words[WARPS], entering_words[WARPS];
  int entries_before[WARPS], entering_before[WARPS];
  int free_slots[MAX_CANDIDATES];
  int histogram[256];
  int digit, needed;                                  // of the selection
  int num_entries, num_entering, num_free;
  int num_active, num_new, num_evicted;
};

__host__ __device__ constexpr int words_of(int num_slots) { return (num_slots + WARP - 1) / WARP; }

// Dynamic shared memory: Scratch, then usage and token [num_slots], then a bitmap of free slots and its ranks.
__host__ inline size_t shared_bytes(int num_slots) {
  return sizeof(Scratch) + sizeof(int) * (2 * num_slots + 2 * words_of(num_slots));
}

// The needed-th smallest of the positions that `for_each` visits, by 8 bits a pass; all are >= 0 and < bound.
template <typename ForEach>
__device__ int select_position(Scratch& s, int needed, int64_t bound, ForEach for_each) {
  int shift = 0;
  while (shift < 24 && (bound >> (shift + 8)) != 0) shift += 8;
  int prefix = 0;  // the digits found, in place
  int known = 0;   // mask of their bits
  for (; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) s.histogram[i] = 0;
    __syncthreads();
    for_each([&](int position) {
      if ((position & known) == prefix) atomicAdd(&s.histogram[(position >> shift) & 255], 1);
    });
    __syncthreads();
    if (threadIdx.x < WARP) {
      constexpr int BINS = 256 / WARP;
      int counts[BINS], sum = 0;
#pragma unroll
      for (int i = 0; i < BINS; ++i) sum += counts[i] = s.histogram[threadIdx.x * BINS + i];
      int inclusive = sum;
      for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, inclusive, step);
        if (threadIdx.x >= step) inclusive += other;
      }
      int left = needed - (inclusive - sum);
      if (left >= 1 && left <= sum) {  // one lane holds the digit
#pragma unroll
        for (int i = 0; i < BINS; ++i) {
          if (left >= 1 && left <= counts[i]) {
            s.digit = threadIdx.x * BINS + i;
            s.needed = left;
          }
          left -= counts[i];
        }
      }
    }
    __syncthreads();
    prefix |= s.digit << shift;
    known |= 255 << shift;
    needed = s.needed;
  }
  return prefix;
}

template <bool STREAM>
__global__ void __launch_bounds__(THREADS, 1)
    kernel(Window window, const int64_t* candidates, int num_candidates, Changes changes) {
  extern __shared__ __align__(16) unsigned char memory[];
  Scratch& s = *reinterpret_cast<Scratch*>(memory);
  int* usage = reinterpret_cast<int*>(memory + sizeof(Scratch));
  int* token_of = usage + window.num_slots;
  const int num_words = words_of(window.num_slots);
  unsigned* free_words = reinterpret_cast<unsigned*>(token_of + window.num_slots);
  int* free_before = reinterpret_cast<int*>(free_words + num_words);
  const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;

  // Everything that the call reads is asked for at once.
  const int64_t candidate = thread < num_candidates ? candidates[thread] : -1;
  const int64_t clock = *window.clock;
  const bool is_entry = candidate >= 0 && candidate < window.vocab_size;
  const int id = static_cast<int>(candidate);
  int slot = is_entry ? window.slot_of[id] : -1;
  for (int i = thread; i < window.num_slots; i += THREADS) {
    usage[i] = window.usage[i];
    token_of[i] = window.token_of[i];
  }
  for (int i = thread; i < TABLE; i += THREADS) {
    s.table.ids[i] = s.table.last[i] = -1;
    s.table.occurrences[i] = 0;
  }
  if (thread == 0) s.num_active = s.num_new = s.num_evicted = 0;
  const unsigned entry_word = __ballot_sync(FULL_WARP, is_entry);
  if (lane == 0) s.entry_words[warp] = entry_word;
  __syncthreads();
  rank_words(s.entry_words, WARPS, s.entries_before, &s.num_entries);

  // Place of each entry in the call, the last place of each id, and which entries stay in the ring.
  const int place = rank_of(s.entry_words, s.entries_before, warp);
  const bool is_kept = is_entry && (!STREAM || place >= s.num_entries - window.ring_length);
  int in_table = 0;
  if (is_entry) {
    in_table = s.table.find_or_insert(id);
    atomicMax(&s.table.last[in_table], place);
    if (STREAM && is_kept) {
      atomicAdd(&s.table.occurrences[in_table], 1);
      if (slot >= 0) atomicAdd(&usage[slot], 1);
      int* cell = window.ring + (clock + place) % window.ring_length;
      const int leaving = *cell;
      *cell = id;
      const int leaving_slot = leaving >= 0 ? window.slot_of[leaving] : -1;
      if (leaving_slot >= 0) atomicAdd(&usage[leaving_slot], -1);
    }
  }
  if (thread == 0) *window.clock = clock + s.num_entries;
  __syncthreads();
  const bool is_last = is_entry && s.table.last[in_table] == place;
  const bool is_new = is_last && slot < 0;
  const int position = static_cast<int>(clock + place);

  int limit = -1;  // lru: unpinned ids last seen up to here have no room
  if (!STREAM) {
    if (is_last && slot >= 0) usage[slot] = position;
    const int num_new = __popc(__ballot_sync(FULL_WARP, is_new));
    if (lane == 0 && num_new > 0) atomicAdd(&s.num_new, num_new);
    for (int first = 0; first < window.num_slots; first += THREADS) {
      const int i = first + thread;
      const int num_active = __popc(__ballot_sync(FULL_WARP, i < window.num_slots && token_of[i] >= 0));
      if (lane == 0 && num_active > 0) atomicAdd(&s.num_active, num_active);
    }
    __syncthreads();
    const int excess = s.num_active + s.num_new - window.num_slots;
    if (excess > 0) {
      limit = select_position(s, excess, clock + s.num_entries, [&](auto&& visit) {
        if (is_new) visit(position);
        for (int i = thread; i < window.num_slots; i += THREADS) {
          if (token_of[i] >= 0 && !window.pinned[i]) visit(usage[i]);
        }
      });
    }
  }
  const bool enters = is_new && (STREAM ? is_kept : position > limit);

  // Free slots, those of the ids that leave included, as a bitmap.
  for (int first = 0; first < window.num_slots; first += THREADS) {
    const int i = first + thread;
    const bool is_slot = i < window.num_slots;
    const int token = is_slot ? token_of[i] : 0;
    const bool leaves = is_slot && token >= 0 && (STREAM ? usage[i] == 0 : usage[i] <= limit) && !window.pinned[i];
    if (leaves) {
      window.slot_of[token] = -1;
      window.token_of[i] = -1;
    }
    if (is_slot) window.usage[i] = leaves ? 0 : usage[i];
    const unsigned free_word = __ballot_sync(FULL_WARP, is_slot && (token < 0 || leaves));
    const unsigned leaving_word = __ballot_sync(FULL_WARP, leaves);
    if (lane == 0 && i < window.num_slots) free_words[i / WARP] = free_word;
    if (lane == 0 && leaving_word != 0) atomicAdd(&s.num_evicted, __popc(leaving_word));
  }
  const unsigned entering_word = __ballot_sync(FULL_WARP, enters);
  if (lane == 0) s.entering_words[warp] = entering_word;
  __syncthreads();
  rank_words(free_words, num_words, free_before, &s.num_free);
  rank_words(s.entering_words, WARPS, s.entering_before, &s.num_entering);

  // The ids that enter take the free slots in ascending order.
  const int num_entering = min(s.num_entering, s.num_free);
  for (int i = thread; i < window.num_slots; i += THREADS) {
    if (free_words[i / WARP] >> lane & 1) {
      const int rank = rank_of(free_words, free_before, i / WARP);
      if (rank < num_entering) s.free_slots[rank] = i;
    }
  }
  __syncthreads();
  if (enters) {
    const int rank = rank_of(s.entering_words, s.entering_before, warp);
    if (rank < num_entering) {
      slot = s.free_slots[rank];
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
