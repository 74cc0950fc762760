"""Fitting a causal language model to encoded turns, the same way each time it is run.

Loss falls on answers only. Sequences of like length share a batch, padded at the right: under a
causal mask padding changes nothing, so there is no attention mask.
"""

import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from examples.starter.vocab import END_OF_TEXT, SPECIALS, encode_answer, encode_prompt

POOL = 16
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of one turn, split where the loss begins."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        """How many tokens the turn has."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to fit."""

    steps: int
    batch: int
    peak: float
    warmup: int

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at a step: a ramp, then half a cosine."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.01 + 0.99 * 0.5 * (1 + cos(pi * done))


def encode(prompt: str, answer: str, *, system: str | None = None) -> Encoded:
    """One turn as token ids."""
    return Encoded(encode_prompt(prompt, system=system), encode_answer(answer))


def prepare(*, seed: int, threads: int) -> None:
    """Make what follows depend on the seed and the number of threads alone."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def fit(
    model: PreTrainedModel | nn.Module,
    turns: Iterator[Encoded],
    *,
    schedule: Schedule,
    optimisers: Sequence[torch.optim.Optimizer],
    seed: int,
) -> None:
    """Fit the parameters that the optimisers hold, and report to stderr."""
    model.train()
    started = time.monotonic()
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    batches = itertools.islice(_batches(turns, schedule.batch, seed), schedule.steps)
    for step, batch in enumerate(batches):
        _set_rates(optimisers, peaks, schedule.rate(step))
        loss = _step(model, batch, optimisers)
        if step % 50 == 0 or step == schedule.steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step:5d}  loss {loss:.4f}  {seconds:6.0f} s", file=sys.stderr, flush=True)


def _step(
    model: nn.Module, batch: list[Encoded], optimisers: Sequence[torch.optim.Optimizer]
) -> float:
    inputs, labels = _pad(batch)
    loss: Tensor = model(input_ids=inputs, labels=labels, use_cache=False).loss
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    held = [
        weight for each in optimisers for group in each.param_groups for weight in group["params"]
    ]
    nn.utils.clip_grad_norm_(held, 1.0)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.item()


def _set_rates(
    optimisers: Sequence[torch.optim.Optimizer], peaks: list[list[float]], share: float
) -> None:
    for optimiser, rates in zip(optimisers, peaks, strict=True):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * share


def _batches(turns: Iterator[Encoded], size: int, seed: int) -> Iterator[list[Encoded]]:
    """Batches of like length, drawn from pools of `POOL` batches, in random order."""
    rng = random.Random(seed)
    while pool := list(itertools.islice(turns, size * POOL)):
        pool.sort(key=len)
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        yield from (pool[start : start + size] for start in starts)


def _pad(batch: list[Encoded]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one batch, both [batch, longest]."""
    longest = max(map(len, batch))
    inputs = torch.full((len(batch), longest), SPECIALS[END_OF_TEXT])
    labels = torch.full((len(batch), longest), IGNORED)
    for row, turn in enumerate(batch):
        start, end = len(turn.prompt), len(turn)
        inputs[row, :end] = torch.tensor(turn.prompt + turn.answer)
        labels[row, start:end] = torch.tensor(turn.answer)
    return inputs, labels
