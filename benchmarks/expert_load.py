"""How long an expert takes from the SSD to the first product with it, and to change experts.

A rank-16 LoRA on all projections of a Qwen3-0.6B-shaped base, its file in the page cache, nothing
of it in memory. Loading verifies every byte; the floor reads, hashes and copies the same bytes in
the fewest calls; PEFT's ``load_adapter`` verifies nothing.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, Run, absent, compare, main, timed
from benchmarks.inputs import HIDDEN, INTERMEDIATE, KEYS, LAYERS, QUERIES, shapes, write_lora
from benchmarks.installed import WEIGHTS, installed
from expertctl.digest import Digest
from expertctl.engine.budget import Budget
from expertctl.engine.compose import Form
from expertctl.engine.experts import ExpertSource, Target, compiled
from expertctl.engine.gains import GainSource
from expertctl.engine.tiers import Tiers
from expertctl.store.derived import Derived

BASE = "bench/qwen3-0.6b"
INSTALL = "pip install 'expertctl[dev]'"
BUDGET = 1 << 30
HEAD_DIM, VOCAB = 128, 1024
"""The vocabulary is small: no LoRA touches it."""


def measure(rounds: int) -> Sequence[Row]:
    """Load a 40 MB LoRA cold, then switch between two that are in memory."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = (write_lora(Path(folder, name), seed=i) for i, name in enumerate("ab"))
        rows = [
            compare(
                "verified cold load, SSD to compiled",
                _cold(one),
                _floor(one / WEIGHTS),
                rival="read + sha256 + copy",
                rounds=rounds,
                target="<= 1.5",
            )
        ]
        return rows + (_against_peft(one, two, rounds) if find_spec("peft") else _without_peft())


def _against_peft(one: Path, two: Path, rounds: int) -> list[Row]:
    """3 times as fast is a ratio of at most a third."""
    model = _peft_model(one)
    model.load_adapter(str(two), adapter_name="two")
    cold = compare(
        "verified cold load, SSD to compiled",
        _cold(one),
        _peft_load(model, one),
        rival="PEFT load_adapter (verifies nothing)",
        rounds=rounds,
        target="<= 0.333",
    )
    with _switching(one, two, forget=False) as ours:
        known = compare(
            "switch to an expert whose plan is compiled",
            ours,
            _peft_switch(model),
            rival="PEFT set_adapter",
            rounds=rounds,
            target="<= 1.0",
        )
    with _switching(one, two, forget=True) as ours:
        new = compare(
            "switch to an expert in memory, plan compiled anew",
            ours,
            _peft_switch(model),
            rival="PEFT set_adapter",
            rounds=rounds,
            target="<= 1.0",
        )
    return [cold, known, new]


def _without_peft() -> list[Row]:
    cases = {
        "verified cold load, SSD to compiled": ("PEFT load_adapter (verifies nothing)", "<= 0.333"),
        "switch to an expert whose plan is compiled": ("PEFT set_adapter", "<= 1.0"),
        "switch to an expert in memory, plan compiled anew": ("PEFT set_adapter", "<= 1.0"),
    }
    return [
        absent(case, rival=rival, install=INSTALL, target=target)
        for case, (rival, target) in cases.items()
    ]


def _target() -> Target:
    """The base's form; no expert here has DoRA, so nothing of the base is asked for."""
    form = Form(shapes(), HIDDEN, torch.float32, torch.device("cpu"))
    gains = GainSource(Digest.of(b"base"), lambda _: torch.empty(0), Derived(Path()))
    return Target(form, gains)


def _use(tiers: Tiers, source: ExpertSource, target: Target) -> None:
    tiers.begin_request()
    chain = [(source, 1.0)]
    with compiled(tiers, chain, identity=source.content_digest, target=target) as plan:
        assert len(plan.deltas) == len(target.form.shapes)


def _cold(directory: Path) -> Run:
    source, target = installed(directory, base=BASE), _target()

    def load() -> None:
        budget = Budget(BUDGET)
        _use(Tiers(ram=budget, device=budget), source, target)

    return timed(load)


def _floor(path: Path) -> Run:
    def load() -> None:
        data = bytearray(path.read_bytes())
        hashlib.sha256(data).digest()

    return timed(load)


@contextmanager
def _switching(one: Path, two: Path, *, forget: bool) -> Iterator[Run]:
    """Change between two experts in memory; ``forget`` their compiled plans each time."""
    budget, target = Budget(BUDGET), _target()
    tiers, sources = Tiers(ram=budget, device=budget), [installed(d, base=BASE) for d in (one, two)]
    with tiers.pin([source.wanted for source in sources]):
        for source in sources:
            _use(tiers, source, target)

        def switch() -> float:
            sources.reverse()
            if forget:
                tiers.clear()
            return timed(lambda: _use(tiers, sources[0], target))()

        yield switch


def _peft_model(directory: Path) -> Any:
    """A base of that shape whose weights are never touched, with one adapter."""
    from peft import PeftModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERIES // HEAD_DIM,
        num_key_value_heads=KEYS // HEAD_DIM,
        head_dim=HEAD_DIM,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to_empty(device="cpu")
    return PeftModel.from_pretrained(model, str(directory), adapter_name="one")


def _peft_load(model: Any, directory: Path) -> Run:
    def load() -> float:
        seconds = timed(lambda: model.load_adapter(str(directory), adapter_name="cold"))()
        model.delete_adapter("cold")
        return seconds

    return load


def _peft_switch(model: Any) -> Run:
    names = ["one", "two"]

    def switch() -> float:
        names.reverse()
        return timed(lambda: model.set_adapter(names[0]))()

    return switch


if __name__ == "__main__":
    main("expert_load", measure, rounds=15)
