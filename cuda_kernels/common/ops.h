// The six ops of a backend; what each does is said in microspec_hf/ops, whose reference is the definition.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

namespace microspec {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, int64_t k);

Tensor topk_candidates(const Tensor& logits, int64_t k);

std::tuple<Tensor, Tensor, Tensor, Tensor> build_tree(const Tensor& scores, const Tensor& tokens,
                                                      const Tensor& parents, const Tensor& root,
                                                      int64_t num_nodes);

void gather_rows(Tensor out, const Tensor& weight, const Tensor& rows, const Tensor& slots, const Tensor& count);

std::tuple<Tensor, Tensor, Tensor> window_update(Tensor slot_of, Tensor token_of, Tensor usage, Tensor ring,
                                                 Tensor clock, const Tensor& candidates, const Tensor& pinned,
                                                 bool stream);

void compact_kv(std::vector<Tensor> buffers, const Tensor& path, const Tensor& start);

}  // namespace microspec
