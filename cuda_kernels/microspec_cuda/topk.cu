#include "../common/ops.h"
#include "draft_topk.cuh"
#include "launch.h"
#include "topk_candidates.cuh"

namespace microspec {

namespace {

// Rows of a logits tensor can be read 16 bytes at a time.
bool has_vector_rows(const Tensor& logits) {
  return is_aligned(logits, 16) && logits.size(1) * logits.element_size() % 16 == 0;
}

}  // namespace

std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, int64_t k) {
  const Argument argument{"draft_topk", "logits", logits};
  argument.dims(2).contiguous();
  check_cuda(argument);
  check_k("draft_topk", logits, k);
  check_at_most("draft_topk", "columns", logits.size(1), device::draft_topk::MAX_COLUMNS);
  check_at_most("draft_topk", "k", k, device::draft_topk::MAX_K);
  const int64_t num_rows = logits.size(0);
  const int num_columns = static_cast<int>(logits.size(1));
  Tensor scores = new_tensor(logits, {num_rows, k}, ScalarType::Float);
  Tensor slots = new_tensor(logits, {num_rows, k}, ScalarType::Long);
  if (num_rows == 0) return {scores, slots};

  const Launch launch(logits);
  for_logits_type("draft_topk", logits, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        has_vector_rows(logits) ? device::draft_topk::kernel<T, true> : device::draft_topk::kernel<T, false>;
    launch.start(kernel, dim3(static_cast<unsigned>(num_rows)), dim3(device::draft_topk::THREADS), 0, 1,
                 data<const T>(logits), data<float>(scores), data<int64_t>(slots), num_columns, k);
  });
  return {scores, slots};
}

Tensor topk_candidates(const Tensor& logits, int64_t k) {
  const Argument argument{"topk_candidates", "logits", logits};
  argument.dims(2).contiguous();
  check_cuda(argument);
  check_k("topk_candidates", logits, k);
  check_at_most("topk_candidates", "k", k, device::topk_candidates::MAX_K);
  check_at_most("topk_candidates", "rows", logits.size(0), 65535);
  check_at_most("topk_candidates", "columns", logits.size(1), 1 << 30);
  const int64_t num_rows = logits.size(0);
  const int num_columns = static_cast<int>(logits.size(1));
  Tensor ids = new_tensor(logits, {num_rows, k}, ScalarType::Long);
  if (num_rows == 0) return ids;

  const Launch launch(logits);
  const unsigned max_cluster = launch.architecture() >= 90 ? device::topk_candidates::MAX_CLUSTER : 1;
  for_logits_type("topk_candidates", logits, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        has_vector_rows(logits) ? device::topk_candidates::kernel<T, true> : device::topk_candidates::kernel<T, false>;
    using Tile = device::topk_candidates::Tile<T>;
    // As many blocks for a row as it has tiles, if the chip can join them.
    unsigned cluster = 1;
    while (cluster < max_cluster && cluster * Tile::COLUMNS < num_columns) cluster *= 2;
    launch.start(kernel, dim3(cluster, static_cast<unsigned>(num_rows)), dim3(device::topk_candidates::THREADS),
                 Tile::BYTES, cluster, data<const T>(logits), data<int64_t>(ids), num_columns, k);
  });
  return ids;
}

}  // namespace microspec
