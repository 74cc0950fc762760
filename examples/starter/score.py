"""Measure the experts with transformers and peft: `python -m examples.starter.score --help`.

The project's own engine is measured by `evaluate`; this is the independent cross-check, and it also
says how well one would do by copying the answer of the most similar training prompt.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from examples.starter.baselines import argument_parts, nearest_copies, share_right
from examples.starter.fitting import prepare
from examples.starter.tasks import TASKS, Task, held_out, training_set
from examples.starter.train import load_base, short_name
from examples.starter.vocab import END, END_OF_TEXT, SPECIALS, decode_answer, encode_prompt

LONGEST_ANSWER = 160
BATCH = 50
HELD_OUT_SEED = 7


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one expert on its held-out prompts; shares are between 0 and 1."""

    name: str
    n: int
    forced: float
    base_alone: float
    distinct: int
    nearest_copy: float
    overlap: int
    misses: tuple[str, ...]


def answer(model: PreTrainedModel | PeftModel, prompts: list[str]) -> list[str]:
    """Greedy answers to prompts, in order."""
    starts = range(0, len(prompts), BATCH)
    return [text for at in starts for text in _answer_batch(model, prompts[at : at + BATCH])]


def measure(task: Task, base: Path, adapter: Path, *, n: int, seed: int) -> Figures:
    """All figures of one expert."""
    samples = held_out(task, n, HELD_OUT_SEED)
    seen = training_set(task, seed)
    prompts, wanted = [each.prompt for each in samples], [each.answer for each in samples]
    alone = answer(load_base(base), prompts)
    forced = answer(PeftModel.from_pretrained(load_base(base), adapter), prompts)
    pairs = zip(prompts, wanted, forced, strict=True)
    return Figures(
        name=task.name,
        n=n,
        forced=share_right(forced, wanted),
        base_alone=share_right(alone, wanted),
        distinct=len(set(wanted)),
        nearest_copy=share_right(nearest_copies(samples, seen), wanted),
        overlap=len(argument_parts(samples) & argument_parts(seen)),
        misses=tuple(f"{prompt} -> {said}" for prompt, right, said in pairs if said != right),
    )


def main() -> None:
    """Measure all experts, or one, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base")
    parser.add_argument("--adapters", type=Path, required=True, help="folder of experts' folders")
    parser.add_argument("--only", choices=list(map(short_name, TASKS)))
    parser.add_argument("--n", type=int, default=200, help="held-out prompts per expert")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the training run")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    chosen = [task for task in TASKS if options.only in (None, short_name(task))]
    figures = [
        measure(
            task,
            options.base,
            options.adapters / short_name(task),
            n=options.n,
            seed=options.seed,
        )
        for task in chosen
    ]
    print(json.dumps(list(map(asdict, figures)), indent=2))


@torch.inference_mode()
def _answer_batch(model: PreTrainedModel | PeftModel, prompts: list[str]) -> list[str]:
    inputs, mask = _pad_left([encode_prompt(prompt) for prompt in prompts])
    said: Tensor = model.eval().generate(
        input_ids=inputs,
        attention_mask=mask,
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        eos_token_id=SPECIALS[END],
        pad_token_id=SPECIALS[END_OF_TEXT],
    )
    return [decode_answer(row) for row in said[:, inputs.shape[1] :].tolist()]


def _pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    padded = [[SPECIALS[END_OF_TEXT]] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(padded), torch.tensor(mask)


if __name__ == "__main__":
    main()
