"""Whole runs on bases of routed experts: added, planned, answered, with experts of packages."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from expertctl.engine.load_plan import estimate_base_sizes
from expertctl.engine.local_engine import LocalEngine
from expertctl.errors import BaseMismatchError, IncompatibleError, InvalidPackageError
from expertctl.package.base_model import read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from expertctl.schema.manifest import AdapterKind
from tests.engine.conftest import ReferenceModel
from tests.engine.moe.test_stacked_adapters import saved
from tests.engine.package_fixtures import EnginePackages
from tests.engine.reference_models import ALL_MODULES, ATTENTION, merge_adapter
from tests.engine.test_local_engine import PROMPT, planner, request, run
from tests.engine.torch.test_compat import engine_of, prompt_ids, until_end
from tests.factories import write_base, write_dora, write_lora
from tests.store.fixtures import HomeFixture, fast, make_key, user_home
from tests.tensor_shapes import CLASSES

__all__ = ["fast", "user_home"]

pytestmark = pytest.mark.all

ARCHS = sorted(CLASSES)
SQL = ForcedExpert(Reference.parse("acme/sql"))
ALONE = {"route": {"base_alone": True}}
STACKS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.fixture(scope="session")
def packages_by_architecture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EnginePackages]:
    folder = tmp_path_factory.mktemp("routed")
    bases = {arch: write_base(folder / arch, arch=arch, tie=False, seed=2) for arch in ARCHS}
    return {
        arch: EnginePackages(folder / f"{arch}-m", base, read_base(base))
        for arch, base in bases.items()
    }


@pytest.fixture
def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), budget=16 << 20)


def greedy(model: Any, tokens: int) -> tuple[int, ...]:
    """What transformers answers to the prompt."""
    ids = torch.tensor([prompt_ids(PROMPT)])
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return until_end(out[0, ids.shape[1] :].tolist())


def model_of(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


@pytest.mark.parametrize(
    ("arch", "kind"), [*((arch, "lora") for arch in ARCHS), ("mixtral", "dora"), ("dots1", "dora")]
)
def test_the_tokens_are_those_of_transformers(
    arch: str,
    kind: AdapterKind,
    engine: LocalEngine,
    user_home: HomeFixture,
    packages_by_architecture: dict[str, EnginePackages],
    tmp_path: Path,
) -> None:
    engine_packages = packages_by_architecture[arch]
    assert not user_home.bases.add(engine_packages.base_dir).foreign
    options = {"targets": ALL_MODULES, "scale": 0.4, "seed": 7}
    user_home.install(
        engine_packages.package(adapters=[(kind, options)], seed=len(kind) + ord(kind[0]))
    )
    model = model_of(engine_packages.base_dir)
    alone = run(engine, request(**ALONE))
    assert alone.generated.tokens == greedy(model, 6)
    adapted = run(engine, request(SQL))
    write = {"lora": write_lora, "dora": write_dora}[kind]
    assert merge_adapter(model, write(tmp_path / "same", engine_packages.base_dir, **options)) > 0
    assert adapted.generated.tokens == greedy(model, 6) != alone.generated.tokens
    assert adapted.warnings == alone.warnings == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_what_peft_saved_of_stacks_is_packed_and_answers_as_it_does(
    arch: str,
    engine: LocalEngine,
    user_home: HomeFixture,
    packages_by_architecture: dict[str, EnginePackages],
    tmp_path: Path,
) -> None:
    engine_packages = packages_by_architecture[arch]
    user_home.bases.add(engine_packages.base_dir)
    model = model_of(engine_packages.base_dir)
    adapted = saved(
        ReferenceModel(engine_packages.base_dir, model), tmp_path / "saved", **STACKS
    ).peft
    (tmp_path / "saved" / "README.md").unlink()
    plan = plan_build(
        tmp_path / "saved", ManifestOverrides(name="acme/sql"), base=engine_packages.base
    )
    assert (plan.warnings, plan.manifest.adapters[0].tensors) == ((), 8)
    user_home.install(build_package(plan, tmp_path / "stacks.expert", key=make_key("acme")).path)
    alone = run(engine, request(**ALONE))
    ours = run(engine, request(SQL))
    assert ours.generated.tokens == greedy(adapted, 6) != alone.generated.tokens
    with pytest.raises(IncompatibleError, match="the base has no such layer"):
        run(engine_of(user_home), request(SQL, route={"engine": "transformers"}))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_other_engine_gives_the_same_tokens(
    arch: str, user_home: HomeFixture, packages_by_architecture: dict[str, EnginePackages]
) -> None:
    engine_packages = packages_by_architecture[arch]
    user_home.bases.add(engine_packages.base_dir)
    lora = {"targets": ATTENTION, "scale": 0.6, "seed": 3}
    user_home.install(engine_packages.package(adapters=[("lora", lora)], seed=5))
    engine = engine_of(user_home)
    ours, theirs = (
        run(engine, request(SQL, route={"engine": name})) for name in ("native", "transformers")
    )
    assert ours.generated.tokens == theirs.generated.tokens


def test_the_other_engine_refuses_an_adapter_on_routed_experts(
    user_home: HomeFixture, packages_by_architecture: dict[str, EnginePackages]
) -> None:
    """Transformers keeps them in stacks, in which PEFT adapts no expert alone."""
    engine_packages = packages_by_architecture["olmoe"]
    user_home.bases.add(engine_packages.base_dir)
    lora = {"targets": ("experts.1.down_proj",), "scale": 0.6}
    user_home.install(engine_packages.package(adapters=[("lora", lora)], seed=6))
    with pytest.raises(
        IncompatibleError, match=r"experts\.1\.down_proj and 1 more: the base has no such layer"
    ):
        run(engine_of(user_home), request(SQL, route={"engine": "transformers"}))


def test_a_small_base_in_bfloat16_is_answered_by_torch(
    engine: LocalEngine, user_home: HomeFixture, packages_by_architecture: dict[str, EnginePackages]
) -> None:
    user_home.bases.add(packages_by_architecture["olmoe"].base_dir)
    wide = run(engine, request(**ALONE))
    narrow = run(engine, request(route={"base_alone": True, "dtype": "bf16"}))
    assert 0 < narrow.memory.held["base"] < 0.6 * wide.memory.held["base"]
    assert narrow.generated.tokens


def test_a_base_is_listed_with_the_sizes_that_it_can_be_held_in(
    user_home: HomeFixture, packages_by_architecture: dict[str, EnginePackages]
) -> None:
    engine_packages = packages_by_architecture["mixtral"]
    weights, token = estimate_base_sizes(user_home.bases.add(engine_packages.base_dir))
    stored = sum(file.stat().st_size for file in engine_packages.base_dir.glob("*.safetensors"))
    assert set(weights) == {"float32", "bf16"}
    assert abs(weights["float32"] - stored) < 1 << 13  # the header
    assert token == 2 * 2 * 2 * 8 * 4


def test_an_adapter_on_a_router_is_not_built(
    packages_by_architecture: dict[str, EnginePackages],
) -> None:
    lora = {"targets": ("q_proj", "gate"), "scale": 0.4}
    with pytest.raises(InvalidPackageError, match="chooses the experts of its layer"):
        packages_by_architecture["qwen3_moe"].package("acme/router", adapters=[("lora", lora)])


def test_an_expert_of_a_dense_base_is_not_installed_for_a_routed_one(
    user_home: HomeFixture, packages_by_architecture: dict[str, EnginePackages], tmp_path: Path
) -> None:
    dense = write_base(tmp_path / "olmoe", arch="qwen3", tie=False)
    package = EnginePackages(tmp_path / "m", dense, read_base(dense)).package()
    user_home.bases.add(packages_by_architecture["olmoe"].base_dir)
    with pytest.raises(BaseMismatchError, match="the architecture differs"):
        user_home.install(package)
