"""What is trained, how long, and with which learning rates.

Defaults: rank 8 with a scale of 2, all linear layers of the blocks, AdamW without weight decay, a
linear warm-up and then a linear decay to zero. A training without `steps` takes `epochs` passes
over the examples, or fewer steps if the measured speed does not allow them in `minutes`. The number
of steps is decided before the first one, because the learning rate depends on it; it is recorded,
and the same number gives the same adapter again.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

TrainedKind = Literal["lora", "dora", "ia3", "prompt"]
Settings = dict[str, str | int | float | None]
"""Settings by name, as a record has them."""

LEARNING_RATES: Mapping[TrainedKind, float] = {
    "lora": 1e-3,
    "dora": 1e-3,
    "ia3": 1e-2,
    "prompt": 3e-2,
}
_WARMUP_SHARE = 0.05
_EVALUATIONS_PER_EPOCH = 2
_TIME_SHARE = 0.85
"""The share of the minutes that steps are planned for; held-out losses and checkpoints take time,
and the speed varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The settings of one training; equal ones with equal data give equal adapters."""

    kind: TrainedKind = "lora"
    rank: int = 8
    """For `lora` and `dora`."""
    virtual_tokens: int = 16
    """For `prompt`."""
    learning_rate: float = LEARNING_RATES["lora"]
    epochs: int = 3
    minutes: float | None = None
    """The longest time for training, without the evaluation afterwards."""
    steps: int | None = None
    """An exact number of steps, which replaces epochs and minutes."""
    batch_size: int = 8
    patience: int = 3
    """After how many evaluations without a lower held-out loss training stops."""
    seed: int = 0

    def to_json(self) -> Settings:
        """Return the settings that were used, for records."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """The number of steps, the learning rate of each, and when the held-out loss is computed."""

    steps: int
    steps_per_epoch: int
    peak: float

    @property
    def warmup(self) -> int:
        """How many steps the learning rate rises."""
        return max(1, math.ceil(_WARMUP_SHARE * self.steps))

    @property
    def evaluation_interval(self) -> int:
        """After how many steps the held-out loss is computed."""
        return max(1, self.steps_per_epoch // _EVALUATIONS_PER_EPOCH)

    def get_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / max(1, self.steps - self.warmup + 1)
        return self.peak * min(1.0, rising, falling)

    def is_evaluated_after(self, step: int) -> bool:
        """Tell whether the held-out loss is computed after a step, counted from 0."""
        return (step + 1) % self.evaluation_interval == 0 or step + 1 == self.steps


def plan_schedule(
    options: TrainingOptions, *, steps_per_epoch: int, seconds_per_step: float | None
) -> TrainingSchedule:
    """Decide the number of steps from the settings and the measured time of a step."""
    steps = options.steps
    if steps is None:
        steps = options.epochs * steps_per_epoch
        if options.minutes is not None and seconds_per_step:
            allowed = int(_TIME_SHARE * 60 * options.minutes / seconds_per_step)
            steps = max(1, min(steps, allowed))
    return TrainingSchedule(steps, steps_per_epoch, options.learning_rate)
