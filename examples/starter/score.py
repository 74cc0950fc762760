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
from examples.starter.composed import compose
from examples.starter.compositions import COMPOSITIONS, Composition
from examples.starter.experts import EXPERTS
from examples.starter.fitting import prepare
from examples.starter.samples import Task, held_out, training_set
from examples.starter.train import load_base
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


@dataclass(frozen=True, slots=True)
class Together:
    """What was measured of two experts on prompts that need both."""

    plan: tuple[str, ...]
    n: int
    together: float
    alone: tuple[float, ...]
    misses: tuple[str, ...]


def answer(
    model: PreTrainedModel | PeftModel, prompts: list[str], virtual: Tensor | None = None
) -> list[str]:
    """Greedy answers to prompts, in order; ``virtual`` embeddings stand before each."""
    batches = [prompts[at : at + BATCH] for at in range(0, len(prompts), BATCH)]
    return [text for batch in batches for text in _answer_batch(model, batch, virtual)]


def measure(task: Task, base: Path, adapter: Path, *, n: int, seed: int) -> Figures:
    """All figures of one expert."""
    samples = held_out(task, n, HELD_OUT_SEED)
    seen = training_set(task, seed)
    prompts, wanted = [each.prompt for each in samples], [each.answer for each in samples]
    alone = answer(load_base(base), prompts)
    forced = answer(PeftModel.from_pretrained(load_base(base), adapter), prompts)
    return Figures(
        name=task.name,
        n=n,
        forced=share_right(forced, wanted),
        base_alone=share_right(alone, wanted),
        distinct=len(set(wanted)),
        nearest_copy=share_right(nearest_copies(samples, seen), wanted),
        overlap=len(argument_parts(samples) & argument_parts(seen)),
        misses=_misses(prompts, wanted, forced),
    )


def measure_together(composition: Composition, base: Path, adapters: Path, *, n: int) -> Together:
    """All figures of one composition; the wanted answer is that of both."""
    samples = held_out(composition, n, HELD_OUT_SEED)
    prompts, wanted = [each.prompt for each in samples], [each.answer for each in samples]
    folders = [adapters / task.short_name for task in composition.plan]
    alone = [
        answer(PeftModel.from_pretrained(load_base(base), folder), prompts) for folder in folders
    ]
    composed = compose(base, *folders)
    said = answer(composed.model, prompts, composed.virtual)
    return Together(
        plan=tuple(task.name for task in composition.plan),
        n=n,
        together=share_right(said, wanted),
        alone=tuple(share_right(each, wanted) for each in alone),
        misses=_misses(prompts, wanted, said),
    )


def main() -> None:
    """Measure all, or one expert and its compositions, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base")
    parser.add_argument("--adapters", type=Path, required=True, help="folder of experts' folders")
    parser.add_argument("--only", choices=[task.short_name for task in EXPERTS])
    parser.add_argument("--n", type=int, default=200, help="held-out prompts per expert")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the training run")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    only, base, adapters = options.only, options.base, options.adapters
    experts = [
        measure(task, base, adapters / name, n=options.n, seed=options.seed)
        for task in EXPERTS
        if only in (None, name := task.short_name)
    ]
    together = [
        measure_together(each, base, adapters, n=options.n)
        for each in COMPOSITIONS
        if only in (None, *(task.short_name for task in each.plan))
    ]
    document = {
        "experts": list(map(asdict, experts)),
        "compositions": list(map(asdict, together)),
    }
    print(json.dumps(document, indent=2))


def _misses(prompts: list[str], wanted: list[str], said: list[str]) -> tuple[str, ...]:
    """Prompts with a wrong answer, and that answer."""
    rows = zip(prompts, wanted, said, strict=True)
    return tuple(f"{prompt} -> {text}" for prompt, right, text in rows if text != right)


@torch.inference_mode()
def _answer_batch(
    model: PreTrainedModel | PeftModel, prompts: list[str], virtual: Tensor | None
) -> list[str]:
    ids, mask = _pad_left([encode_prompt(prompt) for prompt in prompts])
    start = 0 if virtual is not None else ids.shape[1]  # what answers from embeddings hold
    said: Tensor = model.eval().generate(
        **_inputs(model, ids, mask, virtual),
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        eos_token_id=SPECIALS[END],
        pad_token_id=SPECIALS[END_OF_TEXT],
    )
    return [decode_answer(row) for row in said[:, start:].tolist()]


def _inputs(
    model: PreTrainedModel | PeftModel, ids: Tensor, mask: Tensor, virtual: Tensor | None
) -> dict[str, Tensor]:
    if virtual is None:
        return {"input_ids": ids, "attention_mask": mask}
    before = virtual.expand(len(ids), -1, -1)  # [rows, virtual tokens, width]
    embedded = torch.cat([before, model.get_input_embeddings()(ids)], dim=1)
    seen = torch.cat([torch.ones(before.shape[:2], dtype=mask.dtype), mask], dim=1)
    return {"inputs_embeds": embedded, "attention_mask": seen}


def _pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    padded = [[SPECIALS[END_OF_TEXT]] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(padded), torch.tensor(mask)


if __name__ == "__main__":
    main()
