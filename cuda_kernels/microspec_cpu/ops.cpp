// The six ops on the CPU, single-threaded and plain: they make the package whole on a machine without a GPU.
#include "../common/ops.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "../common/checks.h"

namespace microspec {

namespace {

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <typename Value>
struct Element {
  Value value;
  int64_t index;

  // (value desc, index asc), the order of all selections.
  bool operator<(const Element& other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

// The k best of `values`, best first.
template <typename Value>
std::vector<Element<Value>> top(const std::vector<Value>& values, int64_t k) {
  std::vector<Element<Value>> best;  // a heap whose front is the worst
  best.reserve(k);
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()) && k > 0; ++i) {
    const Element<Value> element{values[i], i};
    if (static_cast<int64_t>(best.size()) < k) {
      best.push_back(element);
      std::push_heap(best.begin(), best.end());
    } else if (element < best.front()) {
      std::pop_heap(best.begin(), best.end());
      best.back() = element;
      std::push_heap(best.begin(), best.end());
    }
  }
  std::sort_heap(best.begin(), best.end());
  return best;
}

// Calls `body(T{})` with the element type of floating logits.
template <typename Body>
void for_logits_type(const char* op, const Tensor& logits, Body&& body) {
  switch (logits.scalar_type()) {
    case ScalarType::Half: return body(torch::headeronly::Half{});
    case ScalarType::BFloat16: return body(torch::headeronly::BFloat16{});
    case ScalarType::Float: return body(float{});
    case ScalarType::Double: return body(double{});
    default:
      STD_TORCH_CHECK(false, op, ": logits must be floating point, got ",
                      torch::headeronly::toString(logits.scalar_type()), ".");
  }
}

template <typename Value>
Value without_nan(Value value) {
  return std::isnan(value) ? -std::numeric_limits<Value>::infinity() : value;
}

void check_cpu(const Argument& argument) {
  STD_TORCH_CHECK(argument.tensor.is_cpu(), argument.op, ": ", argument.name, " must be on the CPU, got ",
                  Argument::device_of(argument.tensor), ".");
}

// Values of an int32 or int64 tensor.
std::vector<int64_t> indices_of(const Tensor& tensor, int64_t length) {
  std::vector<int64_t> values(length);
  if (tensor.scalar_type() == ScalarType::Int) {
    std::copy_n(data<const int32_t>(tensor), length, values.begin());
  } else {
    std::copy_n(data<const int64_t>(tensor), length, values.begin());
  }
  return values;
}

}  // namespace

std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, int64_t k) {
  const Argument argument{"draft_topk", "logits", logits};
  argument.dims(2).contiguous();
  check_cpu(argument);
  check_k("draft_topk", logits, k);
  const int64_t num_rows = logits.size(0), num_columns = logits.size(1);
  Tensor scores = new_tensor(logits, {num_rows, k}, ScalarType::Float);
  Tensor slots = new_tensor(logits, {num_rows, k}, ScalarType::Long);
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  for_logits_type("draft_topk", logits, [&](auto element) {
    using T = decltype(element);
    std::vector<float> row(num_columns);
    for (int64_t r = 0; r < num_rows; ++r) {
      const T* source = data<const T>(logits) + r * num_columns;
      for (int64_t c = 0; c < num_columns; ++c) {
        row[c] = std::min(without_nan(static_cast<float>(source[c])), std::numeric_limits<float>::max());
      }
      const auto best = top(row, k);
      const float maximum = best.front().value;
      double sum = 0.0;
      if (maximum > NEVER) {
        for (const float logit : row) sum += std::exp(logit - maximum);
      }
      for (int64_t i = 0; i < k; ++i) {
        const float logit = best[i].value;
        data<float>(scores)[r * k + i] = logit > NEVER ? (logit - maximum) - static_cast<float>(std::log(sum)) : NEVER;
        data<int64_t>(slots)[r * k + i] = best[i].index;
      }
    }
  });
  return {scores, slots};
}

Tensor topk_candidates(const Tensor& logits, int64_t k) {
  const Argument argument{"topk_candidates", "logits", logits};
  argument.dims(2).contiguous();
  check_cpu(argument);
  check_k("topk_candidates", logits, k);
  const int64_t num_rows = logits.size(0), num_columns = logits.size(1);
  Tensor ids = new_tensor(logits, {num_rows, k}, ScalarType::Long);
  for_logits_type("topk_candidates", logits, [&](auto element) {
    using T = decltype(element);
    using Value = std::conditional_t<std::is_same_v<T, double>, double, float>;
    std::vector<Value> row(num_columns);
    for (int64_t r = 0; r < num_rows; ++r) {
      const T* source = data<const T>(logits) + r * num_columns;
      for (int64_t c = 0; c < num_columns; ++c) row[c] = without_nan(static_cast<Value>(source[c]));
      const auto best = top(row, k);
      for (int64_t i = 0; i < k; ++i) data<int64_t>(ids)[r * k + i] = best[i].index;
    }
  });
  return ids;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> build_tree(const Tensor& scores, const Tensor& tokens,
                                                      const Tensor& parents, const Tensor& root,
                                                      int64_t num_nodes) {
  const int64_t num_candidates = check_tree(scores, tokens, parents, root, num_nodes);
  check_cpu({"build_tree", "scores", scores});
  const auto new_nodes = [&] { return new_tensor(scores, {num_nodes}, ScalarType::Long); };
  Tensor node_tokens = new_nodes(), node_parents = new_nodes(), depths = new_nodes(), ancestors = new_nodes();

  std::vector<float> values(data<const float>(scores), data<const float>(scores) + num_candidates);
  for (float& value : values) value = without_nan(value);
  std::vector<int64_t> selected;
  for (const auto& element : top(values, num_nodes - 1)) selected.push_back(element.index);
  std::sort(selected.begin(), selected.end());
  std::vector<int64_t> node_of(num_candidates, 0);
  for (int64_t node = 1; node < num_nodes; ++node) node_of[selected[node - 1]] = node;

  for (int64_t node = 0; node < num_nodes; ++node) {
    int64_t token = *data<const int64_t>(root), parent = -1;
    if (node > 0) {
      const int64_t candidate = selected[node - 1], flat = data<const int64_t>(parents)[candidate];
      const bool exists = values[candidate] > -std::numeric_limits<float>::infinity();
      token = exists ? data<const int64_t>(tokens)[candidate] : -1;
      parent = flat >= 0 && flat < num_candidates ? node_of[flat] : 0;
      STD_TORCH_CHECK(parent < node, "build_tree: the parent of candidate ", candidate,
                      " must have a smaller number, got ", flat, ".");
    }
    data<int64_t>(node_tokens)[node] = token;
    data<int64_t>(node_parents)[node] = parent;
    data<int64_t>(depths)[node] = node > 0 ? data<int64_t>(depths)[parent] + 1 : 0;
    const uint64_t above = node > 0 ? static_cast<uint64_t>(data<int64_t>(ancestors)[parent]) : 0;
    data<int64_t>(ancestors)[node] = static_cast<int64_t>(above | uint64_t{1} << node);
  }
  return {node_tokens, node_parents, depths, ancestors};
}

void gather_rows(Tensor out, const Tensor& weight, const Tensor& rows, const Tensor& slots, const Tensor& count) {
  check_gather(out, weight, rows, slots, count);
  check_cpu({"gather_rows", "out", out});
  if (weight.numel() == 0) return;
  const int64_t length = std::min<int64_t>(*data<const int32_t>(count), rows.size(0));
  const size_t bytes = weight.numel() / weight.size(0) * weight.element_size();
  const auto sources = indices_of(rows, std::max<int64_t>(0, length));
  const auto targets = indices_of(slots, std::max<int64_t>(0, length));
  for (int64_t i = 0; i < length; ++i) {
    STD_TORCH_CHECK(sources[i] >= 0 && sources[i] < weight.size(0) && targets[i] >= 0 && targets[i] < out.size(0),
                    "gather_rows: entry ", i, " copies row ", sources[i], " to slot ", targets[i], ", but there are ",
                    weight.size(0), " rows and ", out.size(0), " slots.");
    std::memcpy(data<char>(out) + targets[i] * bytes, data<const char>(weight) + sources[i] * bytes, bytes);
  }
}

std::tuple<Tensor, Tensor, Tensor> window_update(Tensor slot_of, Tensor token_of, Tensor usage, Tensor ring,
                                                 Tensor clock, const Tensor& candidates, const Tensor& pinned,
                                                 bool stream) {
  check_window(slot_of, token_of, usage, ring, clock, candidates, pinned);
  check_cpu({"window_update", "slot_of", slot_of});
  const int64_t vocab_size = slot_of.size(0), num_slots = token_of.size(0), num_candidates = candidates.size(0);
  const int64_t ring_length = ring.size(0), before = *data<const int64_t>(clock);
  int* const slot = data<int>(slot_of);
  int* const token = data<int>(token_of);
  int* const use = data<int>(usage);
  int* const cells = data<int>(ring);
  const bool* const is_pinned = data<const bool>(pinned);

  std::vector<int64_t> entries;
  for (int64_t i = 0; i < num_candidates; ++i) {
    const int64_t id = data<const int64_t>(candidates)[i];
    if (id >= 0 && id < vocab_size) entries.push_back(id);
  }
  const int64_t num_entries = static_cast<int64_t>(entries.size());
  *data<int64_t>(clock) = before + num_entries;
  std::unordered_map<int64_t, int64_t> last;
  for (int64_t i = 0; i < num_entries; ++i) last[entries[i]] = i;

  // New ids in the order of their last occurrences, and which of the active ones leave.
  std::vector<int64_t> entering;  // places among the entries
  std::vector<int64_t> leaving;   // slots
  std::unordered_map<int64_t, int> occurrences;
  if (stream) {
    const int64_t first_kept = std::max<int64_t>(0, num_entries - ring_length);
    for (int64_t i = first_kept; i < num_entries; ++i) {
      int& cell = cells[(before + i) % ring_length];
      if (cell >= 0 && slot[cell] >= 0) --use[slot[cell]];
      cell = static_cast<int>(entries[i]);
      if (slot[cell] >= 0) ++use[slot[cell]];
      ++occurrences[cell];
    }
    for (int64_t i = first_kept; i < num_entries; ++i) {
      if (last[entries[i]] == i && slot[entries[i]] < 0) entering.push_back(i);
    }
    for (int64_t s = 0; s < num_slots && num_candidates > 0; ++s) {
      if (token[s] >= 0 && !is_pinned[s] && use[s] == 0) leaving.push_back(s);
    }
  } else {
    for (int64_t i = 0; i < num_entries; ++i) {
      if (last[entries[i]] != i) continue;
      if (slot[entries[i]] < 0) {
        entering.push_back(i);
      } else {
        use[slot[entries[i]]] = static_cast<int>(before + i);
      }
    }
    std::vector<int64_t> positions;  // of all that may leave or stay out
    int64_t num_active = 0;
    for (int64_t s = 0; s < num_slots; ++s) {
      num_active += token[s] >= 0;
      if (token[s] >= 0 && !is_pinned[s]) positions.push_back(use[s]);
    }
    for (const int64_t i : entering) positions.push_back(before + i);
    const int64_t excess = num_active + static_cast<int64_t>(entering.size()) - num_slots;
    int64_t limit = -1;
    if (excess > 0) {
      std::nth_element(positions.begin(), positions.begin() + (excess - 1), positions.end());
      limit = positions[excess - 1];
    }
    for (int64_t s = 0; s < num_slots; ++s) {
      if (token[s] >= 0 && !is_pinned[s] && use[s] <= limit) leaving.push_back(s);
    }
    entering.erase(std::remove_if(entering.begin(), entering.end(),
                                  [&](int64_t i) { return before + i <= limit; }),
                   entering.end());
  }

  for (const int64_t s : leaving) {
    slot[token[s]] = -1;
    token[s] = -1;
    use[s] = 0;
  }
  Tensor rows = new_tensor(candidates, {num_candidates}, ScalarType::Long);
  Tensor slots = new_tensor(candidates, {num_candidates}, ScalarType::Long);
  Tensor counts = new_tensor(candidates, {2}, ScalarType::Int);
  std::fill_n(data<int64_t>(rows), num_candidates, -1);
  std::fill_n(data<int64_t>(slots), num_candidates, -1);
  int64_t next_free = 0;
  for (size_t rank = 0; rank < entering.size(); ++rank) {
    const int64_t place = entering[rank], id = entries[place];
    while (token[next_free] >= 0) ++next_free;
    data<int64_t>(rows)[rank] = id;
    data<int64_t>(slots)[rank] = next_free;
    slot[id] = static_cast<int>(next_free);
    token[next_free] = static_cast<int>(id);
    use[next_free] = stream ? occurrences[id] : static_cast<int>(before + place);
  }
  data<int>(counts)[0] = static_cast<int>(entering.size());
  data<int>(counts)[1] = static_cast<int>(leaving.size());
  return {rows, slots, counts};
}

void compact_kv(std::vector<Tensor> buffers, const Tensor& path, const Tensor& start) {
  check_compact(buffers, path, start);
  check_cpu({"compact_kv", "path", path});
  const int64_t first = *data<const int64_t>(start);
  for (const Tensor& buffer : buffers) {
    const int64_t num_heads = buffer.size(1), capacity = buffer.size(2);
    const int64_t bytes = buffer.size(3) * static_cast<int64_t>(buffer.element_size());
    const int64_t length = std::max<int64_t>(0, std::min(path.size(0), capacity - first));
    std::vector<char> moved(length * bytes);
    for (int64_t head = 0; head < num_heads; ++head) {
      char* rows = data<char>(buffer) + (head * capacity + first) * bytes;
      for (int64_t i = 0; i < length; ++i) {
        const int64_t node = data<const int64_t>(path)[i];
        STD_TORCH_CHECK(node >= 0 && first + node < capacity, "compact_kv: node ", node, " of the path is row ",
                        first + node, ", but the buffers have ", capacity, " rows.");
        std::memcpy(moved.data() + i * bytes, rows + node * bytes, bytes);
      }
      std::memcpy(rows, moved.data(), moved.size());
    }
  }
}

}  // namespace microspec
