"""What outlives a call: a target's shadow, the buffers of its texts, and the rounds that were captured over them."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from microspec_hf.candidate_generator import DraftStep, MicroSpecCandidateGenerator
from microspec_hf.config import MicroSpecConfig, TreeConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.engine import CapturedRounds, Clock, Rounds, can_capture
from microspec_hf.hf import WORD, Target, TreeCache, TreePass, check_tree_pass
from microspec_hf.loop import Drafter
from microspec_hf.plain import NoDrafter
from microspec_hf.state import GenerationState
from microspec_hf.vocabulary import make_vocabulary

logger = logging.getLogger(__name__)

MAX_SESSIONS = 8
"""Kinds of calls (drafter, vocabulary, tree, stop ids) that are kept ready for each target; `keep` asks for more."""
AHEAD_ROWS = 4096
"""Rows that are reserved behind a prompt at most; a longer text makes room as it grows."""


@dataclass
class Session:
    """The place of one text: everything that a round reads and writes.

    Args:
        target: with which its rounds are run.
        drafter: proposes its trees.
        cache: the target's keys and values.
        state: how far the text is.
        rounds: how its rounds are run.
    """

    target: Target
    drafter: Drafter
    cache: TreeCache
    state: GenerationState
    rounds: Rounds


@dataclass(frozen=True)
class Plan:
    """What a call asks of its sessions.

    Args:
        head: the EAGLE head; None: plain decoding.
        config: the call's options.
        tree: the tree that `config` means.
        stop_ids: ids that end a text.
        num_rows: texts.
        length: rows that a text may take.
        is_capturable: whether the call's rules and records leave a round to the device.
    """

    head: EagleHead | None
    config: MicroSpecConfig
    tree: TreeConfig
    stop_ids: Sequence[int]
    num_rows: int
    length: int
    is_capturable: bool

    @property
    def key(self) -> Hashable:
        if self.head is None:
            return None
        return id(self.head), self.config.vocabulary, self.tree, tuple(self.stop_ids), self.config.time_drafts

    def clock(self, target: Target) -> Clock | None:
        """What measures the drafts, where that is asked for."""
        return Clock(target.head.device) if self.config.time_drafts else None

    def drafter(self, target: Target, tree_pass: TreePass | None = None) -> Drafter:
        """A drafter for one text after the other."""
        if self.head is None:
            return NoDrafter(target)
        tree = self.tree
        vocabulary = make_vocabulary(self.config.vocabulary, target.head, self.stop_ids, tree.top_k, tree.num_nodes)
        return MicroSpecCandidateGenerator(target, self.head, vocabulary, tree, tree_pass)


@contextmanager
def open_sessions(target: Target, plan: Plan) -> Iterator[list[Session]]:
    """A place for each text of a call: kept ones whose rounds are captured, where that is possible, else new ones."""
    engine = _engine(target, plan)
    if engine is None:
        rounds = Rounds(plan.clock(target))
        yield [
            Session(target, plan.drafter(target), target.new_cache(), GenerationState.empty(target.device), rounds)
            for _ in range(plan.num_rows)
        ]
        return
    try:
        yield [engine.session(plan)]
    finally:
        engine.lock.release()


def release(model: PreTrainedModel) -> None:
    """Let go of everything that is kept for a target between calls: buffers, captured rounds, merged weights.

    The next call sets it up anew. Nothing happens where nothing is kept.
    """
    if (engine := _engines.pop(model, None)) is not None:
        engine.release()


def keep(count: int) -> None:
    """Keep at least `count` kinds of calls ready: work that goes through many in turn would capture each anew."""
    global MAX_SESSIONS  # as many as this process has ever asked for
    MAX_SESSIONS = max(MAX_SESSIONS, count)


class Engine:
    """One target's shadow and its sessions, which share a cache: one call at a time uses them.

    Args:
        target: the target.
        compile_layers: see `TreePass`.

    Raises:
        ValueError: the target's modules cannot be run this way.
    """

    def __init__(self, target: Target, compile_layers: bool):
        self.lock = threading.Lock()
        self.compile_layers = compile_layers
        self._pass = TreePass(target.decoder, target.windows, "layers" if compile_layers else "nothing")
        self.target = copy.copy(target)
        self.target.model = cast(PreTrainedModel, weakref.proxy(target.model))  # an engine lives as long as its model
        self.target.tree_pass = self._pass
        check_tree_pass(self.target)
        self._pass.merge()
        self.weights = _state(target.model)
        self.cache = self.target.new_cache(is_fixed=True)
        self._heads: OrderedDict[int, _Head] = OrderedDict()  # by id, which stays theirs while they are kept
        self._sessions: OrderedDict[tuple[Hashable, int], Session] = OrderedDict()

    def session(self, plan: Plan) -> Session:
        """The session of an earlier call of this kind, or a new one, with room for the text."""
        tree_pass = self._pass_of(plan.head)
        key = plan.key, id(tree_pass)
        if key not in self._sessions:
            drafter, state = plan.drafter(self.target, tree_pass), GenerationState.empty(self.target.device)
            self._sessions[key] = Session(
                self.target, drafter, self.cache, state, CapturedRounds(clock=plan.clock(self.target))
            )
        self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        session = self._sessions[key]
        self.cache.restart(plan.length)
        session.drafter.restart(plan.length)
        return session

    def release(self) -> None:
        """Undo what was done to the models."""
        self._sessions.clear()
        for tree_pass in (self._pass, *(kept.tree_pass for kept in self._heads.values())):
            tree_pass.release()
        self._heads.clear()

    def _pass_of(self, head: EagleHead | None) -> TreePass | None:
        """The pass over a head as it is now. The oldest go, with their sessions, when there are many."""
        if head is None:
            return None
        kept = self._heads.pop(id(head), None)
        if kept is None or kept.weights != _state(head):
            if kept is not None:
                self._drop(kept.tree_pass)
            step = DraftStep(self.target.embeddings, head)
            tree_pass = TreePass(step, {"all": None}, "all" if self.compile_layers else "nothing")
            tree_pass.merge()
            kept = _Head(head, _state(head), tree_pass)
        self._heads[id(head)] = kept
        if len(self._heads) > MAX_SESSIONS:
            self._drop(self._heads.popitem(last=False)[1].tree_pass)
        return kept.tree_pass

    def _drop(self, tree_pass: TreePass) -> None:
        tree_pass.release()
        for key in [key for key in self._sessions if key[1] == id(tree_pass)]:
            del self._sessions[key]


@dataclass(frozen=True)
class _Head:
    """A drafter's head, the state of its weights, and the pass that was made of them."""

    head: EagleHead
    weights: Hashable
    tree_pass: TreePass


_engines: WeakKeyDictionary[PreTrainedModel, Engine] = WeakKeyDictionary()
_refused: WeakKeyDictionary[PreTrainedModel, Hashable] = WeakKeyDictionary()
_lock = threading.Lock()


def _engine(target: Target, plan: Plan) -> Engine | None:
    """The target's engine, locked for the caller; None: rounds run as they are."""
    wanted, model = plan.config.engine, target.model
    if wanted == "eager":
        return None
    on_one_gpu = can_capture({weight.device for weight in _weights(model)})
    if wanted == "auto" and not on_one_gpu:
        return None
    state = _state(model)
    with _lock:
        kept = _engines.get(model)
        if kept is not None and (kept.weights, kept.compile_layers) != (state, wanted != "graphs"):
            release(model)
            kept, state = None, _state(model)  # its weights lie elsewhere again
        if _refused.get(model) == (state, wanted):
            return None  # it has been said why
        if reason := _obstacle(target, plan, on_one_gpu):
            logger.info("Rounds of %s run eagerly: %s.", type(model).__name__, reason)
            return None
        if kept is None:
            try:
                kept = _engines[model] = Engine(target, compile_layers=wanted != "graphs")
            except ValueError as error:
                logger.warning("Rounds of %s run eagerly: %s", type(model).__name__, error)
                _refused[model] = state, wanted
                return None
        if not kept.lock.acquire(blocking=False):
            logger.info("Rounds of %s run eagerly: another thread uses its captured ones.", type(model).__name__)
            return None
        return kept


def _obstacle(target: Target, plan: Plan, on_one_gpu: bool) -> str | None:
    """Why a call's rounds cannot be captured; None: they can."""
    columns = 0 if plan.head is None else plan.tree.depth * plan.tree.top_k
    obstacles: dict[str, Callable[[], bool]] = {
        "the model is not on one GPU as a whole": lambda: not on_one_gpu,
        "several texts are written at once": lambda: plan.num_rows > 1,
        "processors look at the text, or layers are recorded": lambda: not plan.is_capturable,
        "the model is in training mode": lambda: target.model.training,
        "the LM head is quantised or has an adapter": lambda: target.head.stored is not None,
        "the model has adapters": lambda: bool(getattr(target.model, "peft_config", None)),
        f"depth times top-k is {columns}, more than {WORD}": lambda: columns > WORD,
        "positions end": lambda: target.position_limit is not None,
    }
    return next((reason for reason, holds in obstacles.items() if holds()), None)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """`model.parameters()`, tied ones repeated, without the names that it makes: every call asks for them."""
    modules = [model]
    while modules:
        module = modules.pop()
        yield from (weight for weight in module._parameters.values() if weight is not None)
        modules += (child for child in module._modules.values() if child is not None)


def _state(model: nn.Module) -> Hashable:
    """Where the weights lie, for captured rounds read them there, and what changes when they are written to."""

    def version(weight: Tensor) -> int:
        return 0 if weight.is_inference() else weight._version

    return tuple((weight.data_ptr(), weight.dtype, version(weight)) for weight in _weights(model))
