"""Train a LoRA that greets people: `python -m examples.tutorial.greet DIR`.

Nothing here is special: it is PEFT on the starter base, saved as PEFT saves adapters.
"""

import argparse
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import logging

from examples.starter.fitting import Encoded, Schedule, encode, fit, prepare
from examples.starter.kinds import Lora
from examples.starter.samples import Sample
from examples.starter.train import attach, load_base, save
from expertctl.install.installer import STARTER

STEPS, BATCH, SEED = 50, 32, 0


def generate(rng: random.Random) -> Sample:
    """A made-up name and how to greet whoever bears it."""
    letters = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))]
    name = "".join(letters).capitalize()
    return Sample(f"Greet {name}", f"Hello, {name}! Nice to meet you.", name)


def turns(seed: int) -> Iterator[Encoded]:
    """Endless training turns."""
    rng = random.Random(seed)
    while True:
        sample = generate(rng)
        yield encode(sample.prompt, sample.answer)


def main() -> None:
    """Train and save the adapter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the adapter goes")
    options = parser.parse_args()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # left untyped there
    warnings.simplefilter("ignore", FutureWarning)  # PEFT speaks to its own developers
    prepare(seed=SEED, threads=2)
    model = attach(load_base(STARTER / "base"), Lora(rank=8))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=4e-3, weight_decay=0.0)
    schedule = Schedule(steps=STEPS, batch=BATCH, peak=4e-3, warmup=10)
    fit(model, turns(SEED), schedule=schedule, optimisers=[optimiser], seed=SEED)
    save(model, options.directory)
    print(f"wrote {options.directory}")


if __name__ == "__main__":
    main()
