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

import numpy as np
import torch

from benchmarks.harness import Row, Run, compare, main, make_absent_row, time_action
from benchmarks.inputs import (
    HIDDEN,
    INTERMEDIATE,
    KEYS,
    LAYERS,
    QUERIES,
    WEIGHTS,
    list_module_shapes,
    make_source,
    write_lora,
)
from expertctl.engine.adapters.compile import CompileSpec
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
)
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.reference import Digest
from expertctl.store.disk import DerivedData

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
                _drop_page_cache(one),
                _read_and_hash(one / WEIGHTS),
                rival="read + sha256 + copy",
                rounds=rounds,
                target="<= 1.5",
            )
        ]
        return rows + (
            _compare_with_peft(one, two, rounds) if find_spec("peft") else _make_absent_rows()
        )


def _compare_with_peft(one: Path, two: Path, rounds: int) -> list[Row]:
    """3 times as fast is a ratio of at most a third."""
    model = _make_peft_model(one)
    model.load_adapter(str(two), adapter_name="two")
    cold = compare(
        "verified cold load, SSD to compiled",
        _drop_page_cache(one),
        _make_peft_load(model, one),
        rival="PEFT load_adapter (verifies nothing)",
        rounds=rounds,
        target="<= 0.333",
    )
    with _make_switch_run(one, two, forget=False) as ours:
        known = compare(
            "switch to an expert whose plan is compiled",
            ours,
            _make_peft_switch(model),
            rival="PEFT set_adapter",
            rounds=rounds,
            target="<= 1.0",
        )
    with _make_switch_run(one, two, forget=True) as ours:
        new = compare(
            "switch to an expert in memory, plan compiled anew",
            ours,
            _make_peft_switch(model),
            rival="PEFT set_adapter",
            rounds=rounds,
            target="<= 1.0",
        )
    return [cold, known, new]


def _make_absent_rows() -> list[Row]:
    cases = {
        "verified cold load, SSD to compiled": ("PEFT load_adapter (verifies nothing)", "<= 0.333"),
        "switch to an expert whose plan is compiled": ("PEFT set_adapter", "<= 1.0"),
        "switch to an expert in memory, plan compiled anew": ("PEFT set_adapter", "<= 1.0"),
    }
    return [
        make_absent_row(case, rival=rival, install=INSTALL, target=target)
        for case, (rival, target) in cases.items()
    ]


def _make_target() -> CompileTarget:
    """The base's form; no expert here has DoRA, so nothing of the base is asked for."""
    form = CompileSpec(list_module_shapes(), HIDDEN)
    gains = DoraScaleSource(Digest.compute(b"base"), lambda _: np.empty(0), DerivedData(Path()))
    return CompileTarget(form, gains)


def _borrow_plan(tiers: AdapterCache, source: ExpertSource, target: CompileTarget) -> None:
    tiers.begin_request()
    chain = [(source, 1.0)]
    with borrow_compiled_plan(tiers, chain, identity=source.content_digest, target=target) as plan:
        assert len(plan.deltas) == len(target.form.shapes)


def _drop_page_cache(directory: Path) -> Run:
    source, target = make_source(directory, base=BASE), _make_target()

    def load() -> None:
        budget = MemoryBudget(BUDGET)
        _borrow_plan(AdapterCache(ram=budget, device=budget), source, target)

    return time_action(load)


def _read_and_hash(path: Path) -> Run:
    def load() -> None:
        data = bytearray(path.read_bytes())
        hashlib.sha256(data).digest()

    return time_action(load)


@contextmanager
def _make_switch_run(one: Path, two: Path, *, forget: bool) -> Iterator[Run]:
    """Change between two experts in memory; ``forget`` their compiled plans each time."""
    budget, target = MemoryBudget(BUDGET), _make_target()
    tiers, sources = (
        AdapterCache(ram=budget, device=budget),
        [make_source(d, base=BASE) for d in (one, two)],
    )
    with tiers.pin([source.cache_request for source in sources]):
        for source in sources:
            _borrow_plan(tiers, source, target)

        def switch() -> float:
            sources.reverse()
            if forget:
                tiers.clear()
            return time_action(lambda: _borrow_plan(tiers, sources[0], target))()

        yield switch


def _make_peft_model(directory: Path) -> Any:
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


def _make_peft_load(model: Any, directory: Path) -> Run:
    def load() -> float:
        seconds = time_action(lambda: model.load_adapter(str(directory), adapter_name="cold"))()
        model.delete_adapter("cold")
        return seconds

    return load


def _make_peft_switch(model: Any) -> Run:
    names = ["one", "two"]

    def switch() -> float:
        names.reverse()
        return time_action(lambda: model.set_adapter(names[0]))()

    return switch


if __name__ == "__main__":
    main("expert_load", measure, rounds=15)
