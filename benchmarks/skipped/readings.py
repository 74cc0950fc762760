"""How well a base reads held-out text, and how well it answers, with some of its experts.

*Text* is read token by token, as answers are. *Questions* are read in one pass each, as prompts
are, and then the right answer token by token. A base gives the right answer, greedily, where each
token of it is the most likely one.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp

from torch import Tensor

from benchmarks.skipped.holdings import HeldBases, Holding
from examples.moe.text import LENGTH, Document, held_out_documents
from examples.starter.experts import EXPERTS
from examples.starter.samples import held_out
from examples.starter.vocab import encode_answer, encode_prompt
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.report import NOTHING, Activity
from expertctl.engine.packed_decoder import PackedDecoder

_WARM_UP, _QUESTION_SEED = 2, 2027
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Material:
    """What is read: documents before anything counts, those that count, and questions."""

    before: tuple[Document, ...]
    documents: tuple[Document, ...]
    questions: tuple[tuple[Ids, Ids], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What came of a part of the material; shares are of 1."""

    perplexity: float
    skipped: float
    """How much of the weights was left out."""
    fallback: float
    """The share of the experts asked for that were not in memory then."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of all of it."""

    text: Part
    answers: Part
    right: float
    """How many answers are right, of 1."""
    rate: float
    """Tokens of text a second."""


def material(*, documents: int, questions: int) -> Material:
    """Return so many documents, and so many questions of each task in an order that is mixed."""
    asked = [
        (encode_prompt(sample.prompt), encode_answer(sample.answer))
        for task in EXPERTS
        for sample in held_out(task, questions, _QUESTION_SEED)
    ]
    random.Random(0).shuffle(asked)
    before = held_out_documents(_WARM_UP, seed=1)
    return Material(tuple(before), tuple(held_out_documents(documents)), tuple(asked))


def found_whole(bases: HeldBases, read: Material) -> Found:
    """Read it with all experts in memory and no cache."""
    return _Reader(PackedDecoder(bases.whole, bases.crew), None).read(read)


def found(bases: HeldBases, holding: Holding, read: Material) -> Found:
    """Read it with some experts in memory."""
    with bases.cache(holding) as cache:
        return _Reader(PackedDecoder(bases.trunk, bases.crew, experts=cache), cache).read(read)


class _Reader:
    def __init__(self, decoder: PackedDecoder, experts: ExpertCache | None) -> None:
        self._decoder, self._experts = decoder, experts

    def read(self, read: Material) -> Found:
        for document in read.before:
            self._losses(document.ids)
        before, begun = self._activity(), time.perf_counter()
        losses = [loss for document in read.documents for loss in self._losses(document.ids)]
        rate = len(losses) / (time.perf_counter() - begun)
        text = _part(losses, self._activity().since(before))
        before = self._activity()
        answers = [self._answer(*question) for question in read.questions]
        losses = [loss for answer, _ in answers for loss in answer]
        right = sum(all_right for _, all_right in answers) / len(answers)
        return Found(text, _part(losses, self._activity().since(before)), right, rate)

    def _losses(self, ids: Ids) -> list[float]:
        """Read a text token by token; return how surprising each was but the first."""
        cache, losses = self._room(), []
        for token, following in pairwise(ids):
            losses.append(_loss(self._decoder.decode(token, cache).logits, following))
        return losses

    def _answer(self, prompt: Ids, answer: Ids) -> tuple[list[float], bool]:
        """Read a question, then its answer; return surprises, and whether it would be given."""
        cache, losses, right = self._room(), [], True
        logits = self._decoder.prefill(prompt, cache).logits
        for token in answer:
            losses.append(_loss(logits, token))
            right &= int(logits.argmax()) == token
            logits = self._decoder.decode(token, cache).logits
        return losses, right

    def _room(self) -> KVPages:
        return KVPages(self._decoder.config, LENGTH, numbers=Scheme.FLOAT32)

    def _activity(self) -> Activity:
        return NOTHING if self._experts is None else self._experts.activity()


def _part(losses: Sequence[float], activity: Activity) -> Part:
    """Return the figures of losses and of what experts were left out meanwhile."""
    return Part(
        perplexity=exp(sum(losses) / len(losses)),
        skipped=activity.skipped / activity.mass if activity.mass else 0.0,
        fallback=activity.misses / activity.requests if activity.requests else 0.0,
    )


def _loss(logits: Tensor, token: int) -> float:
    return -float(logits.double().log_softmax(-1)[token])
