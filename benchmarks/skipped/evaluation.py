"""Evaluates a mixture-of-experts base of which only some experts are in memory, as in runs.

A share counts blocks: the slots of all layers, and the pool that all layers have together, which
has as many blocks as a layer has experts beyond its slots. So not every share is possible.

The evaluation measures perplexity on held-out text, and the share of right answers. *Text* is read
token by token, as answers are. *Questions* are processed in one pass each, as prompts are, and then
the right answer token by token. With greedy decoding, a base gives the right answer if each of its
tokens is the most likely one.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from examples.moe.text import LENGTH, Document, held_out_documents
from examples.starter.experts import EXPERTS
from examples.starter.samples import held_out
from examples.starter.vocab import encode_answer, encode_prompt
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import NO_ACTIVITY, ExpertActivity
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache, MissPolicy
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import read_model_config
from expertctl.store.quantised_file import always_wanted

Numbers = np.ndarray[Any, Any]
SCHEME = Scheme.FLOAT32
"""Data type of bases, so that the cost of skipping is not mixed with that of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfiguration:
    """The share of experts in memory, and the treatment of the others."""

    share: float
    policy: MissPolicy = EXACT_POLICY


def make_cache_plan(routed: ExpertsConfig, share: float) -> CachePlan:
    """Return the largest plan whose blocks are no more than a share of all experts."""
    layers, count = len(routed.layers), routed.count
    slots = int((share * layers * count - count) / (layers - 1) + 1e-9)
    return CachePlan(layers=layers, experts=count, slots=min(max(slots, 0), count))


class PackedExpertReader:
    """Copies experts from memory that is not counted, in the packed layout of a copy of a base.

    That takes 10 microseconds, a quarter of the time to compute a layer; reading one of these small
    experts from files and packing it takes 240 microseconds, six layers.
    """

    def __init__(self, blocks: Mapping[tuple[int, int], Numbers]) -> None:
        """Copy from these experts, by layer and number."""
        self._blocks = blocks

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return its bytes."""
        np.copyto(block, self._blocks[layer, expert])
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return None: an expert that is not resident is missing."""
        return None


class BaseLoader:
    """One base in a directory, for several decoders, one after the other."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        """Read everything except the experts once."""
        self.config = read_model_config(directory)
        self.crew = ThreadPool(threads)
        self.trunk = load_packed_base(directory, self.config, SCHEME, experts=False)
        self.whole = load_packed_base(directory, self.config, SCHEME)

    @property
    def routed(self) -> ExpertsConfig:
        """The shape of its routed experts."""
        assert self.config.experts is not None, "a base of routed experts"
        return self.config.experts

    @contextmanager
    def open_cache(self, holding: CacheConfiguration) -> Iterator[ExpertCache]:
        """Open a cache with some experts; slots begin with those of the lowest numbers."""
        routed, plan = self.routed, make_cache_plan(self.routed, holding.share)
        memory = ExpertMemory(
            make_expert_shape(self.config, SCHEME),
            layers=plan.layers,
            experts=plan.experts,
            blocks=plan.blocks,
        )
        reader = PackedExpertReader(self.whole.experts)
        slots = [LayerSlots(experts=plan.experts, capacity=plan.slots) for _ in routed.layers]
        cache = ExpertCache(
            memory, reader, layer_numbers=routed.layers, slots=slots, policy=holding.policy
        )
        try:
            cache.fill_slots([[]] * plan.layers)
            yield cache
        finally:
            cache.close()


_WARM_UP, _QUESTION_SEED = 2, 2027
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The material: documents for warm-up, documents that count, and questions."""

    before: tuple[Document, ...]
    documents: tuple[Document, ...]
    questions: tuple[tuple[Ids, Ids], ...]


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of a part of the material; shares are from 0 to 1."""

    perplexity: float
    skipped: float
    """The share of the router weight that was left out."""
    fallback: float
    """The share of requested experts that were not in memory at that moment."""


@dataclass(frozen=True, slots=True)
class SkippingResult:
    """The result of all material."""

    text: PartResult
    answers: PartResult
    accuracy: float
    """The share of right answers, from 0 to 1."""
    rate: float
    """Text tokens per second."""


def make_evaluation_set(*, documents: int, questions: int) -> EvaluationSet:
    """Return so many documents, and so many questions of each task in a mixed order."""
    asked = [
        (encode_prompt(sample.prompt), encode_answer(sample.answer))
        for task in EXPERTS
        for sample in held_out(task, questions, _QUESTION_SEED)
    ]
    random.Random(0).shuffle(asked)
    before = held_out_documents(_WARM_UP, seed=1)
    return EvaluationSet(tuple(before), tuple(held_out_documents(documents)), tuple(asked))


def evaluate_whole(bases: BaseLoader, read: EvaluationSet) -> SkippingResult:
    """Process the material with all experts in memory and no cache."""
    return _EvaluatedDecoder(PackedDecoder(bases.whole, bases.crew), None).read(read)


def evaluate(bases: BaseLoader, holding: CacheConfiguration, read: EvaluationSet) -> SkippingResult:
    """Process the material with some experts in memory."""
    with bases.open_cache(holding) as cache:
        return _EvaluatedDecoder(PackedDecoder(bases.trunk, bases.crew, experts=cache), cache).read(
            read
        )


class _EvaluatedDecoder:
    def __init__(self, decoder: PackedDecoder, experts: ExpertCache | None) -> None:
        self._decoder, self._experts = decoder, experts

    def read(self, read: EvaluationSet) -> SkippingResult:
        for document in read.before:
            self._compute_losses(document.ids)
        before, begun = self._activity(), time.perf_counter()
        losses = [
            loss for document in read.documents for loss in self._compute_losses(document.ids)
        ]
        rate = len(losses) / (time.perf_counter() - begun)
        text = _make_part(losses, self._activity().since(before))
        before = self._activity()
        answers = [self._answer(*question) for question in read.questions]
        losses = [loss for answer, _ in answers for loss in answer]
        right = sum(all_right for _, all_right in answers) / len(answers)
        return SkippingResult(text, _make_part(losses, self._activity().since(before)), right, rate)

    def _compute_losses(self, ids: Ids) -> list[float]:
        """Read a text token by token; return the loss of each token except the first."""
        cache, losses = self._make_kv_cache(), []
        for token, following in pairwise(ids):
            losses.append(_compute_loss(self._decoder.decode(token, cache).logits, following))
        return losses

    def _answer(self, prompt: Ids, answer: Ids) -> tuple[list[float], bool]:
        """Process a question, then its answer; return losses, and whether it would be generated."""
        cache, losses, right = self._make_kv_cache(), [], True
        logits = self._decoder.prefill(prompt, cache).logits
        for token in answer:
            losses.append(_compute_loss(logits, token))
            right &= int(logits.argmax()) == token
            logits = self._decoder.decode(token, cache).logits
        return losses, right

    def _make_kv_cache(self) -> PagedKVCache:
        return PagedKVCache(self._decoder.config, LENGTH)

    def _activity(self) -> ExpertActivity:
        return NO_ACTIVITY if self._experts is None else self._experts.activity()


def _make_part(losses: Sequence[float], activity: ExpertActivity) -> PartResult:
    """Return the figures of losses, and of the experts that were left out meanwhile."""
    return PartResult(
        perplexity=exp(sum(losses) / len(losses)),
        skipped=activity.skipped_weight / activity.router_weight if activity.router_weight else 0.0,
        fallback=activity.misses / activity.requests if activity.requests else 0.0,
    )


def _compute_loss(logits: Numbers, token: int) -> float:
    scores = logits.astype(np.float64)
    best = scores.max()
    return float(best + np.log(np.exp(scores - best).sum()) - scores[token])
