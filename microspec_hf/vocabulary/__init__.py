"""Draft vocabularies: over which rows of the target's LM head a drafter's scores are computed.

`FullVocabulary` is EAGLE-2, `StaticVocabulary` FR-Spec and VocabTrim, `DynamicVocabulary` MicroSpec; `CoralVocabulary`
and `DynaSpecVocabulary` let a trained router choose. A vocabulary changes how fast and how well is drafted, never the
text.
"""

from __future__ import annotations

from collections.abc import Sequence

from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.vocabulary.base import DraftVocabulary, VocabularyStatistics
from microspec_hf.vocabulary.coral import CoralVocabulary, coral_partition
from microspec_hf.vocabulary.dynamic import DynamicVocabulary
from microspec_hf.vocabulary.dynaspec import DynaSpecVocabulary, cluster_rows
from microspec_hf.vocabulary.full import FullVocabulary
from microspec_hf.vocabulary.lists import (
    calibrate_token_ids,
    count_token_ids,
    emitted_by,
    load_token_ids,
    save_token_ids,
)
from microspec_hf.vocabulary.router import RouterConfig, VocabularyRouter, clear_routers
from microspec_hf.vocabulary.static import StaticVocabulary, clear_cache

__all__ = [
    "CoralVocabulary",
    "DraftVocabulary",
    "DynaSpecVocabulary",
    "DynamicVocabulary",
    "FullVocabulary",
    "RouterConfig",
    "StaticVocabulary",
    "VocabularyRouter",
    "VocabularyStatistics",
    "calibrate_token_ids",
    "clear_cache",
    "clear_routers",
    "cluster_rows",
    "coral_partition",
    "count_token_ids",
    "emitted_by",
    "load_token_ids",
    "make_vocabulary",
    "save_token_ids",
]


def make_vocabulary(
    config: VocabularyConfig, head: TargetHead, stop_ids: Sequence[int], top_k: int, num_nodes: int = 60
) -> DraftVocabulary:
    """The vocabulary that a configuration describes, for one text.

    Args:
        config: which kind, and its options.
        head: the target's LM head.
        stop_ids: ids that end a text; always active, or the drafter could never propose the end.
        top_k: children of a node of the draft tree.
        num_nodes: nodes that the target checks in a round.

    Raises:
        ValueError: the configuration does not fit the head.
        FileNotFoundError: there is no router where the configuration says.
    """
    if config.kind == "full":
        return FullVocabulary(head, top_k)
    if config.kind == "static":
        return StaticVocabulary(head, (config.token_ids or ())[: config.size], stop_ids, top_k)
    if config.kind == "coral":
        return CoralVocabulary(head, config, stop_ids, top_k)
    if config.kind == "dynaspec":
        return DynaSpecVocabulary(head, config, stop_ids, top_k)
    return DynamicVocabulary(head, config, stop_ids, top_k, config.verify_candidates_of(num_nodes))
