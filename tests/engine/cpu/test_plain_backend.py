"""The backend in numpy: memory as announced, pages of the pool, and neither torch nor numba."""

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from expertctl.digest import Digest
from expertctl.engine.adapters.compile import BASE_ONLY, CompiledPlan
from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadContext
from expertctl.engine.cpu.plain_backend import PlainBackend, PlainModel, get_blas_threads
from expertctl.engine.kv.block_pool import BlockPool, PagedKVCache
from expertctl.engine.kv.kv_cache import KVAllocation, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.model_config import read_model_config
from expertctl.settings import Home
from tests import tensor_shapes
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
)
from tests.factories import write_base

STARTER = Path(__file__).parents[3] / "expertctl" / "_starter" / "base"
IDS = [(7 * n * n + 3 * n) % 61 for n in range(100)]


def load(directory: Path, dtype: str = "float32") -> tuple[PlainBackend, PlainModel]:
    backend = PlainBackend(read_model_config(directory), dtype)
    context = LoadContext(directory=directory, home=Home(directory.parent / "home"))
    return backend, backend.load(context)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("arch", sorted({"llama", "qwen2", "qwen3", *tensor_shapes.CLASSES}))
@pytest.mark.parametrize("tie", [True, False])
def test_a_base_takes_what_was_announced(arch: str, dtype: str, tie: bool, tmp_path: Path) -> None:
    backend, model = load(write_base(tmp_path / "b", arch=arch, tie=tie), dtype)
    assert (backend.name, backend.cache, backend.host_bytes) == ("numpy", None, 0)
    assert model.nbytes == backend.weight_bytes == backend.min_weight_bytes
    assert model.holds_only_weights
    assert (model.routed is None) == (model.decoder.config.experts is None)
    assert (model.counters, model.experts, model.prefill_parts) == (None, None, 1)


def test_a_dtype_without_plain_arrays_is_refused(tmp_path: Path) -> None:
    config = read_model_config(write_base(tmp_path / "b"))
    with pytest.raises(UsageError, match="numpy does not hold a base in 'int8'"):
        _ = PlainBackend(config, "int8").weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_matrix_is_what_is_computed_with(dtype: str, tmp_path: Path) -> None:
    directory = write_base(tmp_path / "b")
    written = load_file(directory / "model.safetensors")
    _, model = load(directory, dtype)
    for module in model.decoder.config.linear_shapes():
        name = "model.embed_tokens" if module == "lm_head" else module
        found, expected = model.matrix(module), written[f"{name}.weight"]
        if dtype == "bf16":
            assert torch.equal(torch.from_numpy(found.copy()).view(torch.bfloat16),
                               expected.bfloat16())  # fmt: skip
        else:
            assert np.array_equal(found, expected.numpy())


@pytest.mark.skipif(get_blas_threads() is None, reason="numpy has another library")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_are_those_of_numpy(count: int, tmp_path: Path) -> None:
    backend, _ = load(write_base(tmp_path / "b"))
    before = get_blas_threads()
    with backend.use_threads(count):
        assert get_blas_threads() == count
    assert get_blas_threads() == before


def test_keys_and_values_are_counted_by_whole_pages(tmp_path: Path) -> None:
    backend, _ = load(write_base(tmp_path / "b"))
    assert backend.kv_bytes(35) == 2 * 2 * 2 * 8 * 4 * 48
    assert backend.kv_layout == "plain pages"


class PlainPool:
    """A model, and a pool for its texts."""

    def __init__(self, directory: Path) -> None:
        self.backend, self.model = load(directory)
        self.budget = MemoryBudget(1 << 24)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.pool: BlockPool = self.backend.create_kv_store(self.tiers)

    def wanted(self, ids: Sequence[int], **options: Any) -> KVRequest:
        values: dict[str, Any] = {"cache_key": "chat", "virtual_tokens": 0, "room": 21, **options}
        capacity = values["virtual_tokens"] + len(ids) + values.pop("room")
        return KVRequest(
            identity=Digest.compute(b"plan"),
            config=self.backend.config,
            ids=ids,
            capacity=capacity,
            **values,
        )

    def turn(
        self,
        ids: Sequence[int],
        answer: Sequence[int] = (),
        plan: CompiledPlan = BASE_ONLY,
        **options: Any,
    ) -> tuple[int, torch.Tensor]:
        """Read a prompt and an answer; return what was reused, and the scores from the prompt's
        last token on.
        """
        virtual = 0 if plan.soft_prompt is None else len(plan.soft_prompt)
        with self.pool.allocate(self.wanted(ids, virtual_tokens=virtual, **options)) as loan:
            session = self.model.start_session(loan.cache, plan)
            rows = [session.prefill(ids[loan.reused :]).logits]
            rows += [session.decode(token).logits for token in answer]
            loan.cache.check_integrity()
            loan.complete((*ids, *answer))
        self.pool.check_integrity()
        self.tiers.check_integrity()
        return loan.reused, torch.from_numpy(np.stack(rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory = tmp_path_factory.mktemp("plain") / "model"
    return build_reference_model(directory, max_position_embeddings=256)


@pytest.fixture
def plain_pool(model: ReferenceModel) -> PlainPool:
    return PlainPool(model.directory)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("qwen3", {}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": 4}),
        ("mistral", {"sliding_window": 18}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 33}),
    ],
)
def test_a_text_that_goes_on_from_another_has_the_scores_of_transformers(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel
) -> None:
    model = oracle(arch, max_position_embeddings=256, **config)
    plain_pool = PlainPool(model.directory)
    assert plain_pool.turn(IDS[:50], IDS[50:53])[0] == 0
    for ids in (IDS[:70], [*IDS[:40], *IDS[:9]], IDS[:33], IDS[:64]):
        reused, rows = plain_pool.turn(ids, [1, 2, 3])
        assert reused in (53, 40, 32, 63)
        assert_same_logits(rows, model.compute_logits([*ids, 1, 2, 3])[len(ids) - 1 :])


def test_texts_on_shared_pages_take_turns(plain_pool: PlainPool, model: ReferenceModel) -> None:
    plain_pool.turn(IDS[:40])
    texts = ([*IDS[:38], *IDS[60:75]], [*IDS[:33], *IDS[20:40]], IDS[7:30])
    with ExitStack() as stack:
        loans: list[KVAllocation[PagedKVCache]] = [
            stack.enter_context(plain_pool.pool.allocate(plain_pool.wanted(text))) for text in texts
        ]
        assert [loan.reused for loan in loans] == [38, 33, 0]
        sessions = [plain_pool.model.start_session(loan.cache, BASE_ONLY) for loan in loans]
        rows: list[list[AnyArray]] = []
        for text, loan, session in zip(texts, loans, sessions, strict=True):
            rows.append([session.prefill(text[loan.reused : len(text) - 8]).logits])
        for step in range(8):
            tokens = [text[len(text) - 8 + step] for text in texts]
            logits = plain_pool.model.step(list(zip(sessions, tokens, strict=True)))
            assert (logits.shape, logits.dtype) == ((3, 61), np.float32)
            for got, row in zip(rows, logits, strict=True):
                got.append(row)
        plain_pool.pool.check_integrity()
    for text, got in zip(texts, rows, strict=True):
        found = torch.from_numpy(np.stack(got))
        assert_same_logits(found, model.compute_logits(text)[len(text) - 9 :])


def test_a_step_that_fails_reads_no_token_of_any_text(plain_pool: PlainPool) -> None:
    with ExitStack() as stack:
        loans = [
            stack.enter_context(
                plain_pool.pool.allocate(plain_pool.wanted(IDS[:9], room=room, cache_key=None))
            )
            for room in (3, 0)
        ]
        sessions = [plain_pool.model.start_session(loan.cache, BASE_ONLY) for loan in loans]
        for session in sessions:
            session.prefill(IDS[:9])
        with pytest.raises(BudgetError):
            plain_pool.model.step([(session, 1) for session in sessions])
        assert [loan.cache.length for loan in loans] == [9, 9]
        with pytest.raises(IncompatibleError):
            plain_pool.model.step([(sessions[0], 1), (sessions[1], 61)])
        assert [loan.cache.length for loan in loans] == [9, 9]


def test_a_text_gets_pages_as_it_grows(plain_pool: PlainPool, model: ReferenceModel) -> None:
    wanted = plain_pool.wanted(IDS[:30], room=50, initial_tokens=31)
    with plain_pool.pool.allocate(wanted) as loan:
        session = plain_pool.model.start_session(loan.cache, BASE_ONLY)
        assert plain_pool.budget.used == plain_pool.backend.kv_bytes(32)
        rows = [session.prefill(IDS[:30]).logits]
        rows += [session.decode(token).logits for token in IDS[30:70]]
        assert plain_pool.budget.used == plain_pool.backend.kv_bytes(70)
    found = torch.from_numpy(np.stack(rows))
    assert_same_logits(found, model.compute_logits(IDS[:70])[29:])


def test_a_soft_prompt_is_reused_with_what_follows_it(plain_pool: PlainPool) -> None:
    soft = np.random.default_rng(2).standard_normal((21, 32)).astype(np.float32) * 0.3
    plan = CompiledPlan({}, soft, soft.nbytes)
    plain_pool.turn(IDS[:30], plan=plan)
    reused, rows = plain_pool.turn(IDS[:40], [1, 2], plan)
    assert reused == 30
    alone, again = plain_pool.turn(IDS[:40], [1, 2], plan, cache_key=None)
    assert alone == 0
    assert_same_logits(rows, again)
    assert not torch.allclose(rows, plain_pool.turn(IDS[:40], [1, 2], cache_key=None)[1])


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_needs_no_more_memory_than_was_announced(rows: int, tmp_path: Path) -> None:
    plain_pool = PlainPool(write_base(tmp_path / "b", vocab=9000, max_position_embeddings=256))
    delta = LinearDelta(
        a=np.ones((4, 32), np.float32), b=np.ones((32, 4), np.float32),
        input_scale=np.ones(32, np.float32), output_scale=np.ones(32, np.float32),
    )  # fmt: skip
    plan = CompiledPlan({"model.layers.0.self_attn.o_proj": delta}, None, 0)
    with ExitStack() as stack:
        wanted = [plain_pool.wanted(IDS, room=20, cache_key=None) for _ in range(rows)]
        loans = [stack.enter_context(plain_pool.pool.allocate(each)) for each in wanted]
        sessions = [plain_pool.model.start_session(loan.cache, plan) for loan in loans]
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for session in sessions:
            session.prefill(IDS)
        plain_pool.model.step([(session, 1) for session in sessions])
        peak = tracemalloc.get_traced_memory()[1] - before
    assert peak <= plain_pool.backend.buffer_bytes(120, width=4, rows=rows)


RUN = """
import sys
from pathlib import Path
from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.cpu.plain_backend import get_blas_threads
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.reference import Digest
from expertctl.package.model_config import read_model_config

class Context:
    directory = Path(sys.argv[1])

backend = PlainBackend(read_model_config(Context.directory), "float32")
model = backend.load(Context)
budget = MemoryBudget(1 << 30)
pool = backend.create_kv_store(AdapterCache(ram=budget, device=budget))
wanted = KVRequest(cache_key=None, identity=Digest.compute(b""), config=backend.config,
                   ids=[5, 6, 7], virtual_tokens=0, capacity=9)
with pool.allocate(wanted) as loan:
    session = model.start_session(loan.cache, BASE_ONLY)
    token = int(session.prefill(wanted.ids).logits.argmax())
    print(token, int(session.decode(token).logits.argmax()))
print([name for name in ("torch", "numba", "safetensors.torch") if name in sys.modules])
"""


def test_the_starter_base_runs_without_torch_and_numba() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(STARTER)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert all(0 <= int(token) < 264 for token in tokens.split())
