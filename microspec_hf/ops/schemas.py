"""The schemas of the ops, and their reference as the implementation for every device."""

from __future__ import annotations

import torch

from microspec_hf.ops import reference

SCHEMAS = {
    "draft_topk": "(Tensor logits, int k) -> (Tensor scores, Tensor slots)",
    "topk_candidates": "(Tensor logits, int k) -> Tensor",
    "build_tree": (
        "(Tensor scores, Tensor tokens, Tensor parents, Tensor root, int num_nodes) "
        "-> (Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors)"
    ),
    "gather_rows": "(Tensor(a!) out, Tensor weight, Tensor rows, Tensor slots, Tensor count) -> ()",
    "window_update": (
        "(Tensor(a!) slot_of, Tensor(b!) token_of, Tensor(c!) usage, Tensor(d!) ring, Tensor(e!) clock, "
        "Tensor candidates, Tensor pinned, bool stream) -> (Tensor rows, Tensor slots, Tensor counts)"
    ),
    "compact_kv": "(Tensor(a!)[] buffers, Tensor path, Tensor start) -> ()",
}
"""Schema of each op of the namespace `microspec`; mutated arguments are marked."""

# The registrations live as long as this object.
LIBRARY = torch.library.Library("microspec", "DEF")

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
