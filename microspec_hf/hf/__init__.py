"""The only package that knows the inside of transformers: caches, masks, hidden states, heads, and their versions.

A target is a plain `PreTrainedModel`. `Target` runs its decoder over explicit positions, masks and a `TreeCache`, and
computes its logits with the model's own head.
"""

from microspec_hf.hf.cache import TreeCache, cache_argument, cache_field, export_cache, import_cache
from microspec_hf.hf.check import check_tree_pass
from microspec_hf.hf.head import TargetHead
from microspec_hf.hf.requests import caller_cache, processors_of_row, refuse_processors_of_batch, refuse_request
from microspec_hf.hf.sight import WORD, Sight, bit_words, chain_words
from microspec_hf.hf.target import Target, additive_mask
from microspec_hf.hf.tree_pass import TreePass

__all__ = [
    "WORD",
    "Sight",
    "Target",
    "TargetHead",
    "TreeCache",
    "TreePass",
    "additive_mask",
    "bit_words",
    "cache_argument",
    "cache_field",
    "caller_cache",
    "chain_words",
    "check_tree_pass",
    "export_cache",
    "import_cache",
    "processors_of_row",
    "refuse_processors_of_batch",
    "refuse_request",
]
