// Schemas of the ops and their registration; nothing else. They are those of `torch.ops.microspec`.
#include <torch/csrc/stable/library.h>

#include "../common/ops.h"
#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("draft_topk(Tensor logits, int k) -> (Tensor scores, Tensor slots)");
  ops.def("topk_candidates(Tensor logits, int k) -> Tensor");
  ops.def(
      "build_tree(Tensor scores, Tensor tokens, Tensor parents, Tensor root, int num_nodes) "
      "-> (Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors)");
  ops.def("gather_rows(Tensor(a!) out, Tensor weight, Tensor rows, Tensor slots, Tensor count) -> ()");
  ops.def(
      "window_update(Tensor(a!) slot_of, Tensor(b!) token_of, Tensor(c!) usage, Tensor(d!) ring, "
      "Tensor(e!) clock, Tensor candidates, Tensor pinned, bool stream) "
      "-> (Tensor rows, Tensor slots, Tensor counts)");
  ops.def("compact_kv(Tensor(a!)[] buffers, Tensor path, Tensor start) -> ()");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("draft_topk", TORCH_BOX(&microspec::draft_topk));
  ops.impl("topk_candidates", TORCH_BOX(&microspec::topk_candidates));
  ops.impl("build_tree", TORCH_BOX(&microspec::build_tree));
  ops.impl("gather_rows", TORCH_BOX(&microspec::gather_rows));
  ops.impl("window_update", TORCH_BOX(&microspec::window_update));
  ops.impl("compact_kv", TORCH_BOX(&microspec::compact_kv));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
