"""Training on tiny bases, against a plain loop with PEFT and transformers."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import (
    BaseMismatchError,
    ConflictError,
    IncompatibleError,
    InvalidPackageError,
    StoreError,
    UsageError,
)
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.train import trainer as training
from expertctl.train.batches import EncodedExample, arrange_epoch, encode_data
from expertctl.train.checkpoint import load_checkpoint
from expertctl.train.data import read_training_data
from expertctl.train.draft import TrainingFolder
from expertctl.train.options import (
    LEARNING_RATES,
    TrainedKind,
    TrainingOptions,
    TrainingSchedule,
    plan_schedule,
)
from expertctl.train.session import TrainedAdapter, TrainingRequest, train_adapter
from expertctl.train.trainer import TrainingProgress, TrainingStoppedError
from tests.train.fixtures import add_tiny_base, write_examples

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
OVERRIDES = ManifestOverrides(name="acme/letters", version="1.0.0")
OPTIONS = TrainingOptions(steps=12, batch_size=4, rank=4, learning_rate=5e-3)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Workplace:
    """A base and examples; each training gets a folder of its own."""

    bases: BaseStore
    stored: StoredBase
    data: Path
    folder: Path
    steps: list[TrainingProgress]
    said: list[str]
    warned: list[str]

    def train(
        self,
        name: str = "a",
        options: TrainingOptions = OPTIONS,
        *,
        stop_after: int | None = None,
        **changed: Any,
    ) -> TrainedAdapter:
        request = TrainingRequest(
            data=read_training_data(self.data),
            base=self.stored,
            options=options,
            folder=TrainingFolder.for_package(self.folder / f"{name}.expert"),
            device="cpu",
            **{"overrides": OVERRIDES, **changed},
        )
        begun = len(self.steps)
        return train_adapter(
            self.bases,
            request,
            report=self.steps.append,
            is_stopped=lambda: stop_after is not None and len(self.steps) - begun >= stop_after,
            notify=self.said.append,
            warn=self.warned.append,
        )


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    bases, stored = add_tiny_base(tmp_path)
    data = write_examples(tmp_path / "data.jsonl")
    return Workplace(bases, stored, data, tmp_path, [], [], [])


def read_weights(trained: TrainedAdapter) -> dict[str, torch.Tensor]:
    return load_file(trained.request.folder.adapter / "adapter_model.safetensors")


def read_files(trained: TrainedAdapter) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in trained.request.folder.adapter.iterdir()}


def train_plainly(
    stored: StoredBase, data: Path, options: TrainingOptions
) -> tuple[dict[str, torch.Tensor], float]:
    """What a plain script with PEFT gives: padding, a mask, the loss of transformers."""
    encoded = encode_data(Tokenizer.open(stored.path), read_training_data(data), context=512)
    base = AutoModelForCausalLM.from_pretrained(stored.path, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.0,
        target_modules=LINEAR,
    )
    torch.manual_seed(options.seed)
    model: Any = get_peft_model(base, config)
    optimiser = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.0
    )
    steps = options.steps or 0
    batches = iter(list_batches(encoded.train, options))
    for step in range(steps):
        warmup = math.ceil(0.05 * steps)
        rate = options.learning_rate * min(
            (step + 1) / warmup, (steps - step) / (steps - warmup + 1), 1.0
        )
        for group in optimiser.param_groups:
            group["lr"] = rate
        model(**collate(next(batches))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        held_out = model(**collate(encoded.held_out)).loss
    kept = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return {n.replace(".default", ""): p for n, p in kept.items()}, float(held_out)


def list_batches(
    examples: Sequence[EncodedExample], options: TrainingOptions
) -> Iterator[Sequence[EncodedExample]]:
    for epoch in range(1000):
        yield from arrange_epoch(
            examples, batch_size=options.batch_size, seed=options.seed, epoch=epoch
        )


def collate(batch: Sequence[EncodedExample]) -> dict[str, torch.Tensor]:
    width = max(len(e.ids) for e in batch)
    ids = torch.full((len(batch), width), 7)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, example in enumerate(batch):
        count = len(example.ids)
        ids[row, :count], mask[row, :count] = torch.tensor(example.ids), 1
        for begin, end in example.spans:
            labels[row, begin:end] = ids[row, begin:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class TestAgainstAPlainLoop:
    def test_the_adapter_is_that_of_a_plain_loop_with_peft(self, workplace: Workplace) -> None:
        trained = workplace.train()
        theirs, held_out = train_plainly(workplace.stored, workplace.data, OPTIONS)
        ours = read_weights(trained)
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], atol=2e-5, rtol=1e-4)
        assert trained.record.best_step == 12  # so the last weights are the result
        assert trained.record.best_loss == pytest.approx(held_out, abs=1e-4)

    @pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt"])
    def test_each_kind_learns_and_peft_reads_what_was_learnt(
        self, kind: TrainedKind, workplace: Workplace
    ) -> None:
        options = replace(OPTIONS, kind=kind, learning_rate=LEARNING_RATES[kind])
        record = (trained := workplace.train(options=options)).record
        assert record.best_loss < record.first_loss
        base = AutoModelForCausalLM.from_pretrained(workplace.stored.path, dtype=torch.float32)
        adapter = str(trained.request.folder.adapter)
        model: Any = PeftModel.from_pretrained(base, adapter).eval()
        encoded = encode_data(
            Tokenizer.open(workplace.stored.path), trained.request.data, context=512
        )
        with torch.no_grad():
            held_out = float(model(**collate(encoded.held_out)).loss)
        assert held_out == pytest.approx(record.best_loss, abs=1e-4)
        plan = plan_build(trained.request.folder.adapter, OVERRIDES, base=trained.request.facts)
        wanted = {"prompt": "soft_prompt"}.get(kind, kind)
        assert [entry.kind for entry in plan.manifest.adapters] == [wanted]

    @pytest.mark.all
    def test_small_parts_of_a_batch_give_the_gradients_of_the_whole(
        self, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = read_weights(workplace.train("whole"))
        monkeypatch.setattr("expertctl.train.batches._MICRO_TOKENS", 40)
        parts = read_weights(workplace.train("parts"))
        for name, weight in whole.items():
            torch.testing.assert_close(parts[name], weight, atol=2e-5, rtol=1e-4)


class TestContinuedTraining:
    def test_a_stopped_training_continues_to_the_same_files(self, workplace: Workplace) -> None:
        whole = workplace.train("whole")
        for stop_after in (5, 4):
            with pytest.raises(TrainingStoppedError):
                workplace.train("parts", stop_after=stop_after)
        parts = workplace.train("parts")
        assert [p.step for p in workplace.steps[12:]] == list(range(1, 13))
        assert workplace.said[-2].startswith("continuing after step 9 of 12 in ")
        assert read_files(parts) == read_files(whole)
        assert parts.record.losses == whole.record.losses

    @pytest.mark.all
    def test_what_was_done_after_the_last_checkpoint_is_done_again(
        self, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = workplace.train("whole")
        saved: list[int] = []

        def save_early(self: training.Trainer, *, stopped: bool) -> None:
            if self.record.step in {3, 6}:
                self._save()
                saved.append(self.record.step)
            if self.record.step == 8:
                raise OSError("killed")

        with monkeypatch.context() as patched:
            patched.setattr(training.Trainer, "_save_if_due", save_early)
            with pytest.raises(StoreError):
                workplace.train("killed")
        assert saved == [3, 6]
        continued = workplace.train("killed")
        assert read_files(continued) == read_files(whole)

    def test_a_finished_training_is_not_repeated(self, workplace: Workplace) -> None:
        first = read_files(workplace.train())
        steps = len(workplace.steps)
        assert read_files(workplace.train()) == first
        assert len(workplace.steps) == steps

    @pytest.mark.all
    def test_equal_seeds_give_equal_files_and_others_do_not(self, workplace: Workplace) -> None:
        first = workplace.train("first")
        again = workplace.train("again")
        other = workplace.train("other", replace(OPTIONS, seed=1))
        assert read_files(first) == read_files(again)
        weights = "adapter_model.safetensors"
        assert read_files(first)[weights] != read_files(other)[weights]

    @pytest.mark.all
    def test_other_settings_or_data_do_not_continue(self, workplace: Workplace) -> None:
        workplace.train()
        with pytest.raises(ConflictError, match="with another learning rate, seed"):
            workplace.train(options=replace(OPTIONS, seed=3, learning_rate=1e-4))
        write_examples(workplace.data, 61)
        with pytest.raises(ConflictError, match="with another data") as caught:
            workplace.train()
        assert "--restart" in caught.value.hint
        assert workplace.train(restart=True).record.step == 12

    def test_a_damaged_checkpoint_is_refused(self, workplace: Workplace) -> None:
        trained = workplace.train()
        path = trained.request.folder.checkpoint
        for data in (b"", path.read_bytes()[:100], b"\x00" * 64):
            path.write_bytes(data)
            with pytest.raises(InvalidPackageError, match="not a readable checkpoint"):
                load_checkpoint(path, trained.record.settings)


class TestEndOfTraining:
    def test_training_ends_when_the_held_out_loss_no_longer_falls(
        self, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        losses = iter([3.0, 2.0, 2.5, 2.4, 2.3])
        monkeypatch.setattr(training.Trainer, "measure_loss", lambda self: next(losses))
        options = replace(OPTIONS, steps=200, batch_size=8)
        record = workplace.train(options=options).record
        interval = TrainingSchedule(200, -(-46 // 8), 1.0).evaluation_interval
        assert (record.ended, record.best_loss, record.best_step) == ("early", 2.0, interval)
        assert record.step == 4 * interval
        assert record.losses == [(n * interval, x) for n, x in enumerate((3.0, 2.0, 2.5, 2.4, 2.3))]

    def test_the_result_has_the_weights_with_the_lowest_loss(
        self, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        losses = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
        kept: list[dict[str, torch.Tensor]] = []

        def measure(self: training.Trainer) -> float:
            kept.append({n: w.detach().clone() for n, w in self.weights.items()})
            return next(losses)

        monkeypatch.setattr(training.Trainer, "measure_loss", measure)
        trained = workplace.train()
        best = {n.replace(".default", ""): w for n, w in kept[1].items()}
        for name, weight in read_weights(trained).items():
            assert torch.equal(weight, best[name])

    def test_training_ends_when_the_time_is_up(
        self, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(training.Trainer, "_measure_step", lambda self: 1e-9)
        options = replace(OPTIONS, steps=None, epochs=900, minutes=1e-6)
        record = workplace.train(options=options).record
        assert (record.step, record.ended) == (1, "time")
        assert record.steps > 1
        assert workplace.said[-1].startswith("trained 1 of ")

    def test_a_time_that_is_too_short_for_an_epoch_allows_one_step(
        self, workplace: Workplace
    ) -> None:
        options = replace(OPTIONS, steps=None, epochs=900, minutes=1e-6)
        record = workplace.train(options=options).record
        assert (record.steps, record.step, record.ended) == (1, 1, "steps")
        assert "tokens/s" in workplace.said[0]

    def test_a_loss_that_is_not_finite_is_an_error(self, workplace: Workplace) -> None:
        with pytest.raises(IncompatibleError, match="the loss is not finite") as caught:
            workplace.train(options=replace(OPTIONS, learning_rate=1e30))
        assert "--learning-rate" in caught.value.hint

    def test_steps_follow_from_epochs_minutes_and_speed(self) -> None:
        options = TrainingOptions(epochs=3, minutes=10)
        many = plan_schedule(options, steps_per_epoch=50, seconds_per_step=1.0)
        few = plan_schedule(options, steps_per_epoch=50, seconds_per_step=10.0)
        exact = plan_schedule(
            replace(options, steps=7, minutes=None), steps_per_epoch=50, seconds_per_step=None
        )
        assert (many.steps, few.steps, exact.steps) == (150, 51, 7)

    def test_the_learning_rate_rises_and_falls(self) -> None:
        rates = [TrainingSchedule(40, 10, 1.0).get_rate(step) for step in range(40)]
        assert rates[:3] == [0.5, 1.0, pytest.approx(38 / 39)]
        assert rates[-1] == pytest.approx(1 / 39)
        assert rates[1:] == sorted(rates[1:], reverse=True)


class TestRefusedTraining:
    def test_a_changed_base_is_refused(self, workplace: Workplace) -> None:
        path = workplace.stored.path / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(BaseMismatchError):
            workplace.train()

    def test_a_bad_manifest_is_refused_before_the_first_step(self, workplace: Workplace) -> None:
        bad = replace(OVERRIDES, description="x" * 100_000)
        with pytest.raises(InvalidPackageError, match="description"):
            workplace.train(overrides=bad)
        assert workplace.steps == []

    def test_a_file_in_the_place_of_the_folder_is_refused(self, workplace: Workplace) -> None:
        (workplace.folder / "a.training").write_text("mine")
        with pytest.raises(UsageError, match="is a file"):
            workplace.train()

    def test_two_trainings_do_not_share_a_folder(self, workplace: Workplace) -> None:
        folder = TrainingFolder.for_package(workplace.folder / "a.expert")
        folder.path.mkdir()
        with FileLock(folder.lock), pytest.raises(StoreError, match="by another process"):
            workplace.train()


def test_the_manifest_says_how_the_adapter_was_trained(workplace: Workplace) -> None:
    trained = workplace.train()
    folder = trained.request.folder
    document = json.loads((folder.adapter / "expert.json").read_text())
    data = read_training_data(workplace.data)
    assert document["description"] == f"Trained on {len(data.train)} examples of data.jsonl"
    assert document["decoding"] == {"temperature": 0.0, "max_tokens": int(3 * 1.25) + 8}
    assert set(document["routing"]["examples"]) == {e.prompt for e in data.train}
    assert document["training"]["data"] == {
        "name": "data.jsonl",
        "digest": str(data.digest),
        "examples": {
            "train": len(data.train),
            "held_out": len(data.held_out),
            "test": len(data.test),
        },
    }
    assert document["training"]["settings"]["seed"] == 0
    assert document["training"]["progress"]["ended"] == "steps"
    rows = [json.loads(line) for line in folder.test.read_text().splitlines()]
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        (e.prompt, e.answer) for e in data.test
    ]
    facts = BaseFacts(workplace.stored.identity, workplace.stored.shapes)
    plan = plan_build(folder.adapter, OVERRIDES, base=facts)
    assert plan.manifest.ref == "acme/letters@1.0.0"
    assert plan.warnings == ()
