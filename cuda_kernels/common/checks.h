// Checks of the launchers: each refusal says what it got and what it expected.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <sstream>
#include <string>

namespace microspec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << (tensor.dim() == 1 ? ",)" : ")");
  return text.str();
}

// One tensor argument of an op, with the names that a refusal needs.
struct Argument {
  const char* op;
  const char* name;
  const Tensor& tensor;

  const Argument& contiguous() const {
    STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got shape ", shape_of(tensor),
                    " with other strides.");
    return *this;
  }

  const Argument& dims(int64_t expected) const {
    STD_TORCH_CHECK(tensor.dim() == expected, op, ": ", name, " must have ", expected,
                    " dimension(s), got shape ", shape_of(tensor), ".");
    return *this;
  }

  const Argument& length(int64_t expected) const {
    dims(1);
    STD_TORCH_CHECK(tensor.size(0) == expected, op, ": ", name, " must have length ", expected, ", got ",
                    tensor.size(0), ".");
    return *this;
  }

  const Argument& dtype(ScalarType expected) const {
    STD_TORCH_CHECK(tensor.scalar_type() == expected, op, ": ", name, " must be ",
                    torch::headeronly::toString(expected), ", got ",
                    torch::headeronly::toString(tensor.scalar_type()), ".");
    return *this;
  }

  const Argument& index_dtype() const {
    STD_TORCH_CHECK(
        tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long, op, ": ", name,
        " must be Int or Long, got ", torch::headeronly::toString(tensor.scalar_type()), ".");
    return *this;
  }

  const Argument& on_device_of(const Argument& other) const {
    STD_TORCH_CHECK(
        tensor.is_cuda() == other.tensor.is_cuda() &&
            tensor.get_device_index() == other.tensor.get_device_index(),
        op, ": ", name, " must be on the device of ", other.name, ", got ", device_of(tensor), " and ",
        device_of(other.tensor), ".");
    return *this;
  }

  static std::string device_of(const Tensor& tensor) {
    return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : std::string("cpu");
  }
};

inline void check_at_most(const char* op, const char* name, int64_t value, int64_t limit) {
  STD_TORCH_CHECK(value <= limit, op, ": ", name, " must be at most ", limit, " for this kernel, got ", value,
                  "; larger calls are for the PyTorch reference.");
}

inline void check_k(const char* op, const Tensor& logits, int64_t k) {
  STD_TORCH_CHECK(k >= 1 && k <= logits.size(1), op, ": k must be from 1 to ", logits.size(1), ", got ", k, ".");
}

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

// The arguments of window_update, checked in one place for both backends.
inline void check_window(const Tensor& slot_of, const Tensor& token_of, const Tensor& usage, const Tensor& ring,
                         const Tensor& clock, const Tensor& candidates, const Tensor& pinned) {
  const char* op = "window_update";
  const Argument slots{op, "slot_of", slot_of};
  slots.dims(1).dtype(ScalarType::Int).contiguous();
  const int64_t num_slots = token_of.numel();
  Argument{op, "token_of", token_of}.dims(1).dtype(ScalarType::Int).contiguous().on_device_of(slots);
  Argument{op, "usage", usage}.length(num_slots).dtype(ScalarType::Int).contiguous().on_device_of(slots);
  Argument{op, "ring", ring}.dims(1).dtype(ScalarType::Int).contiguous().on_device_of(slots);
  Argument{op, "clock", clock}.length(1).dtype(ScalarType::Long).contiguous().on_device_of(slots);
  Argument{op, "candidates", candidates}.dims(1).dtype(ScalarType::Long).contiguous().on_device_of(slots);
  Argument{op, "pinned", pinned}.length(num_slots).dtype(ScalarType::Bool).contiguous().on_device_of(slots);
}

// The arguments of build_tree; returns the number of candidates.
inline int64_t check_tree(const Tensor& scores, const Tensor& tokens, const Tensor& parents, const Tensor& root,
                          int64_t num_nodes) {
  const char* op = "build_tree";
  const Argument first{op, "scores", scores};
  first.dims(1).dtype(ScalarType::Float).contiguous();
  const int64_t num_candidates = scores.size(0);
  Argument{op, "tokens", tokens}.length(num_candidates).dtype(ScalarType::Long).contiguous().on_device_of(first);
  Argument{op, "parents", parents}.length(num_candidates).dtype(ScalarType::Long).contiguous().on_device_of(first);
  Argument{op, "root", root}.length(1).dtype(ScalarType::Long).contiguous().on_device_of(first);
  STD_TORCH_CHECK(num_nodes >= 1 && num_nodes <= 64 && num_nodes <= num_candidates + 1,
                  "build_tree: num_nodes must be from 1 to 64 and at most the ", num_candidates,
                  " candidates and a root, got ", num_nodes, ".");
  return num_candidates;
}

// The arguments of gather_rows.
inline void check_gather(const Tensor& out, const Tensor& weight, const Tensor& rows, const Tensor& slots,
                         const Tensor& count) {
  const char* op = "gather_rows";
  const Argument target{op, "out", out};
  STD_TORCH_CHECK(out.dim() >= 1 && out.dim() == weight.dim(), "gather_rows: out and weight must have the same ",
                  "number of dimensions, at least one, got ", shape_of(out), " and ", shape_of(weight), ".");
  for (int64_t i = 1; i < out.dim(); ++i) {
    STD_TORCH_CHECK(out.size(i) == weight.size(i), "gather_rows: rows of out and weight must have one shape, got ",
                    shape_of(out), " and ", shape_of(weight), ".");
  }
  target.contiguous();
  Argument{op, "weight", weight}.dtype(out.scalar_type()).contiguous().on_device_of(target);
  const Argument indices{op, "rows", rows};
  indices.dims(1).index_dtype().contiguous().on_device_of(target);
  Argument{op, "slots", slots}.length(rows.size(0)).dtype(rows.scalar_type()).contiguous().on_device_of(target);
  Argument{op, "count", count}.length(1).dtype(ScalarType::Int).contiguous().on_device_of(target);
}

// The arguments of compact_kv.
inline void check_compact(const std::vector<Tensor>& buffers, const Tensor& path, const Tensor& start) {
  const char* op = "compact_kv";
  const Argument nodes{op, "path", path};
  nodes.dims(1).dtype(ScalarType::Long).contiguous();
  Argument{op, "start", start}.length(1).dtype(ScalarType::Long).contiguous().on_device_of(nodes);
  for (const Tensor& buffer : buffers) {
    Argument{op, "each buffer", buffer}.dims(4).contiguous().on_device_of(nodes);
    STD_TORCH_CHECK(buffer.size(0) == 1, "compact_kv: each buffer must hold one sequence, got shape ",
                    shape_of(buffer), ".");
  }
}

}  // namespace microspec
