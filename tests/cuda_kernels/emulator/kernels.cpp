// The device code of the project behind plain C functions: each launches a kernel on the emulator.
#include "emulator.h"

#include "build_tree.cuh"
#include "compact_kv.cuh"
#include "draft_topk.cuh"
#include "gather_rows.cuh"
#include "topk_candidates.cuh"
#include "window_update.cuh"

using namespace microspec::device;

namespace {

enum Dtype { FLOAT = 0, HALF = 1, BFLOAT16 = 2 };

template <typename Body>
void for_dtype(int dtype, Body&& body) {
  if (dtype == FLOAT) return body(float{});
  if (dtype == HALF) return body(__half{});
  return body(__nv_bfloat16{});
}

}  // namespace

extern "C" {

void emulate_draft_topk(const void* logits, int dtype, int rows, int columns, int k, int vectorised, float* scores,
                        int64_t* slots) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    emulator::launch(dim3(rows), dim3(draft_topk::THREADS),
                     vectorised ? draft_topk::kernel<T, true> : draft_topk::kernel<T, false>,
                     static_cast<const T*>(logits), scores, slots, columns, k);
  });
}

void emulate_topk_candidates(const void* logits, int dtype, int rows, int columns, int k, int vectorised,
                             int64_t* ids) {
  for_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    emulator::launch(dim3(1, rows), dim3(topk_candidates::THREADS),
                     vectorised ? topk_candidates::kernel<T, true> : topk_candidates::kernel<T, false>,
                     static_cast<const T*>(logits), ids, columns, k);
  });
}

void emulate_build_tree(const float* scores, const int64_t* tokens, const int64_t* parents, const int64_t* root,
                        int candidates, int nodes, int64_t* node_tokens, int64_t* node_parents, int64_t* depths,
                        int64_t* ancestors) {
  const auto run = [&](auto kernel, int threads) {
    emulator::launch(dim3(1), dim3(threads), kernel, scores, tokens, parents, root, candidates, nodes, node_tokens,
                     node_parents, depths, ancestors);
  };
  if (candidates <= 512) return run(build_tree::kernel<512, 1>, 512);
  if (candidates <= 1024) return run(build_tree::kernel<1024, 1>, 1024);
  run(build_tree::kernel<1024, 4>, 1024);
}

void emulate_window_update(int* slot_of, int* token_of, int* usage, int* ring, int64_t* clock,
                           const int64_t* candidates, const bool* pinned, int vocab_size, int num_slots,
                           int ring_length, int num_candidates, int stream, int64_t* rows, int64_t* slots,
                           int* counts) {
  const window_update::Window window = {slot_of, token_of,   usage,     ring,       clock,
                                        pinned,  vocab_size, num_slots, static_cast<unsigned>(ring_length)};
  const window_update::Changes changes = {rows, slots, counts};
  if (window_update::shared_bytes(num_slots) > sizeof emulator::dynamic_shared) std::abort();
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const bool vectorised = num_slots % 16 == 0 && is_aligned(token_of) && is_aligned(usage) && is_aligned(pinned);
  const auto kernel = stream ? (vectorised ? window_update::kernel<true, true> : window_update::kernel<true, false>)
                             : (vectorised ? window_update::kernel<false, true> : window_update::kernel<false, false>);
  emulator::launch(dim3(1), dim3(window_update::THREADS), kernel, window, candidates, num_candidates,
                   window_update::table_size(num_candidates), changes);
}

void emulate_gather_rows(uint32_t* out, const uint32_t* weight, const int64_t* rows, const int64_t* slots,
                         const int* count, int entries, int units, int64_t num_rows, int64_t num_slots) {
  int width = 1;
  while (width < gather_rows::THREADS && width * gather_rows::IN_FLIGHT < units) width *= 2;
  const int height = gather_rows::THREADS / width, step = width * gather_rows::IN_FLIGHT;
  emulator::launch(dim3((entries + height - 1) / height, (units + step - 1) / step), dim3(width, height),
                   gather_rows::kernel<uint32_t, int64_t>, out, weight, rows, slots, count, entries, units, num_rows,
                   num_slots);
}

void emulate_compact_kv(uint32_t** buffers, int num_buffers, const int64_t* path, const int64_t* start, int length,
                        int heads, int64_t capacity, int units) {
  compact_kv::Buffers pointers = {};
  for (int i = 0; i < num_buffers; ++i) pointers.data[i] = buffers[i];
  const int threads = compact_kv::THREADS;
  emulator::launch(dim3((heads * units + threads - 1) / threads, num_buffers), dim3(threads),
                   compact_kv::kernel<uint32_t>, pointers, path, start, length, heads, capacity, units);
}

}  // extern "C"
