"""The training loop: steps, held-out losses, checkpoints, and when it ends.

One thread calls everything. Each step takes one batch: the gradient of the mean loss of its learnt
tokens, clipped to norm 1, then AdamW. After each evaluation the weights with the lowest held-out
loss are kept, and they are the result.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertctl.errors import IncompatibleError
from expertctl.train.batches import (
    Batch,
    EncodedData,
    arrange_by_length,
    arrange_epoch,
    split_batch,
)
from expertctl.train.checkpoint import (
    TrainingRecord,
    load_checkpoint,
    restore_optimiser,
    save_checkpoint,
)
from expertctl.train.model import compute_loss, list_trained
from expertctl.train.options import Settings, TrainingOptions, TrainingSchedule, plan_schedule

CHECKPOINT_SECONDS = 30.0
_MAX_NORM = 1.0
_MEASURED_BATCHES = 3


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """What is shown while training goes on."""

    step: int
    steps: int
    loss: float
    """Mean loss of the last batch, in nats per token."""
    held_out: float
    """Lowest held-out loss so far."""


Report = Callable[[TrainingProgress], None]


class TrainingStoppedError(Exception):
    """The user stopped training; the checkpoint is written."""


class Trainer:
    """One training: a model of PEFT, its optimiser, and its record."""

    def __init__(
        self,
        model: Any,
        data: EncodedData,
        options: TrainingOptions,
        *,
        checkpoint: Path,
        settings: Settings,
        device: str,
        vocab: int,
    ) -> None:
        """Keep what belongs to it; `start` measures or continues."""
        self.model, self.data, self.options = model, data, options
        self.checkpoint, self.device, self.vocab = checkpoint, device, vocab
        self.weights = list_trained(model)
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), lr=options.learning_rate, weight_decay=0.0
        )
        self.record = TrainingRecord(settings, 0)
        self.best = self._copy_weights()
        self.schedule = TrainingSchedule(1, 1, options.learning_rate)
        self.measured_speed = 0.0
        """Tokens of examples per second, of a few batches before the first step."""
        self._saved_at = time.monotonic()

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return -(-len(self.data.train) // self.options.batch_size)

    def start(self) -> bool:
        """Continue from the checkpoint, if there is one; else decide the number of steps.

        Returns whether it continues.

        Raises:
            ConflictError: when the checkpoint belongs to a training with other settings.
        """
        found = load_checkpoint(self.checkpoint, self.record.settings)
        if found is not None:
            self.record = found.record
            restore_optimiser(self.optimiser, self.weights, found)
            self.best = {n: t.to(self.device) for n, t in found.select("best").items()}
            self.schedule = TrainingSchedule(
                self.record.steps, self.steps_per_epoch, self.options.learning_rate
            )
            return True
        needs_speed = self.options.steps is None
        seconds = self._measure_step() if needs_speed else None
        self.schedule = plan_schedule(
            self.options, steps_per_epoch=self.steps_per_epoch, seconds_per_step=seconds
        )
        self.record.steps = self.schedule.steps
        return False

    def train(self, *, report: Report, is_stopped: Callable[[], bool]) -> TrainingRecord:
        """Train to the end, and put the best weights into the model.

        Raises:
            TrainingStoppedError: when ``is_stopped`` said so between two steps.
            IncompatibleError: when the loss is no longer finite.
            DiskFullError: when a checkpoint cannot be written.
        """
        record, started = self.record, time.monotonic() - self.record.seconds
        if not record.losses:
            record.first_loss = record.best_loss = self.measure_loss()
            record.losses.append((0, record.first_loss))
        epoch, batches = -1, list[Batch]()
        while not record.ended:
            if record.step // self.steps_per_epoch != epoch:
                epoch = record.step // self.steps_per_epoch
                batches = self._arrange(epoch)
            batch = batches[record.step % self.steps_per_epoch]
            loss = self.take_step(batch, self.schedule.get_rate(record.step))
            record.step += 1
            record.tokens += sum(len(example.ids) for example in batch)
            if self.schedule.is_evaluated_after(record.step - 1):
                self._evaluate()
            record.seconds = time.monotonic() - started
            record.ended = self._find_end()
            report(TrainingProgress(record.step, record.steps, loss, record.best_loss))
            self._save_if_due(stopped=is_stopped())
        self._save()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.best[name])
        return record

    def take_step(self, batch: Batch, rate: float) -> float:
        """Train on one batch with a learning rate; return its mean loss before that.

        Raises:
            IncompatibleError: when the gradient is no longer finite.
        """
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = self._add_gradients(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), _MAX_NORM)
        if not bool(torch.isfinite(norm)):
            raise IncompatibleError(
                f"the loss is not finite at step {self.record.step + 1}",
                hint="try a lower --learning-rate",
            )
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss

    def measure_loss(self) -> float:
        """Return the mean loss of the learnt tokens of the held-out examples.

        Raises:
            IncompatibleError: when it is not finite.
        """
        batches = arrange_by_length(self.data.held_out, batch_size=self.options.batch_size)
        total = 0.0
        with torch.no_grad():
            for batch in batches:
                for part in split_batch(batch, vocab=self.vocab):
                    total += float(compute_loss(self.model, part, device=self.device))
        loss = total / sum(example.learnt_tokens for example in self.data.held_out)
        if not math.isfinite(loss):
            raise IncompatibleError(
                f"the held-out loss is not finite after step {self.record.step}",
                hint="try a lower --learning-rate, or another base",
            )
        return loss

    def _arrange(self, epoch: int) -> list[Batch]:
        return arrange_epoch(
            self.data.train,
            batch_size=self.options.batch_size,
            seed=self.options.seed,
            epoch=epoch,
        )

    def _measure_step(self) -> float:
        """Return the seconds of a step, from a few batches that change nothing."""
        batches = self._arrange(0)[: _MEASURED_BATCHES + 1]
        self._add_gradients(batches[0])  # the first one prepares memory
        measured = batches[1:] or batches
        begin = time.perf_counter()
        for batch in measured:
            self._add_gradients(batch)
        seconds = time.perf_counter() - begin
        self.optimiser.zero_grad()
        tokens = sum(len(example.ids) for batch in measured for example in batch)
        self.measured_speed = tokens / seconds
        all_tokens = sum(len(example.ids) for example in self.data.train)
        return all_tokens / self.measured_speed / self.steps_per_epoch

    def _add_gradients(self, batch: Batch) -> float:
        """Add the gradients of the mean loss of a batch; return the loss."""
        count = sum(example.learnt_tokens for example in batch)
        total = 0.0
        for part in split_batch(batch, vocab=self.vocab):
            loss = compute_loss(self.model, part, device=self.device) / count
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            total += float(loss.detach())
        return total

    def _evaluate(self) -> None:
        record, loss = self.record, self.measure_loss()
        record.losses.append((record.step, loss))
        if loss < record.best_loss:
            record.best_loss, record.best_step, record.worse = loss, record.step, 0
            self.best = self._copy_weights()
        else:
            record.worse += 1

    def _find_end(self) -> str:
        record, minutes = self.record, self.options.minutes
        if record.step >= record.steps:
            return "steps"
        if record.worse >= self.options.patience:
            return "early"
        if minutes is not None and self.options.steps is None and record.seconds > 60 * minutes:
            return "time"
        return ""

    def _save_if_due(self, *, stopped: bool) -> None:
        if stopped or time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
            self._save()
        if stopped and not self.record.ended:
            raise TrainingStoppedError

    def _save(self) -> None:
        save_checkpoint(
            self.checkpoint,
            self.record,
            weights=self.weights,
            best=self.best,
            optimiser=self.optimiser,
        )
        self._saved_at = time.monotonic()

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}
