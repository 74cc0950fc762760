"""Imports point one way, and what must start without torch does."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors"},
    {"client"},
    {"digest", "reference", "settings", "engine_config", "files", "user_request"},
    {"schema"},
    {"http"},
    {"trust"},
    {"package"},
    {"registry"},
    {"store"},
    {"routing"},
    {"install"},
    {"engine"},
    {"train"},
    {"server"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
COMPAT = {"transformers", "peft"}
TRAINING = {
    f"expertctl.train.{name}" for name in ("base", "checkpoint", "model", "session", "trainer")
}
"""What trains, and is imported only by commands that do."""
SERVER = sorted((ROOT / "registry_server").rglob("*.py"))
MODULES = sorted((ROOT / "expertctl").rglob("*.py"))


@cache
def read_imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """What a file imports anywhere, functions included, and what as soon as it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return named(ast.walk(tree)), named(tree.body)


def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere, functions included."""
    return read_imports(path)[0]


def imported_at_once(path: Path) -> frozenset[str]:
    """Every module that a file imports outside of its functions."""
    return read_imports(path)[1]


def named(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The modules that these statements import, and what they take from them."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def libraries(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def stage(module: str) -> str | None:
    """The stage of an ``expertctl`` module, None for any other and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "expertctl" and len(parts) > 1 and parts[1] in LEVEL else None


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def offenders(paths: list[Path], refused: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """What each module imports that it may not."""
    assert paths
    return {module_name(path): names for path in paths if (names := refused(path))}


def test_only_the_package_itself_belongs_to_no_stage() -> None:
    outside = [path for path in MODULES if stage(module_name(path)) is None]
    assert {path.name for path in outside} <= {"__init__.py"}


def test_a_module_imports_only_earlier_stages() -> None:
    def later(path: Path) -> set[str]:
        own = stage(module_name(path))
        names = imported(path) if own is not None else frozenset()
        return {name for name in names if (s := stage(name)) and LEVEL[s] > LEVEL[str(own)]}

    assert offenders(MODULES, later) == {}


def needs_torch(module: str) -> bool:
    named = {module, module.rpartition(".")[0]}  # also what is imported from a module
    return f"{module}.".startswith("expertctl.engine.torch.") or not named.isdisjoint(TRAINING)


def test_only_one_folder_of_the_engine_and_training_import_torch() -> None:
    def heavy(path: Path) -> set[str]:
        allowed = needs_torch(module_name(path))
        return set() if allowed else libraries(imported(path)) & {"torch", *COMPAT}

    assert offenders(MODULES, heavy) == {}


def test_modules_that_need_torch_are_imported_only_where_they_run() -> None:
    """Elsewhere they are imported inside functions, or for type checkers."""

    def at_once(path: Path) -> set[str]:
        allowed = needs_torch(module_name(path))
        return set() if allowed else set(filter(needs_torch, imported_at_once(path)))

    assert offenders(MODULES, at_once) == {}


def test_a_process_without_torch_has_the_whole_engine_of_a_processor() -> None:
    """What the modules import of each other reaches no torch either."""
    modules = ("local_engine", "serving.engine", "offline", "evaluation", "bench", "bench_subject")
    modules += ("moe.bench", "cpu.backend", "cpu.plain_backend", "cpu.packed_plan")
    lines = "; ".join(f"import expertctl.engine.{name}" for name in modules)
    program = f"import sys; sys.modules['torch'] = None; {lines}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_only_the_compat_engine_and_training_import_what_replaces_our_own() -> None:
    def heavy(path: Path) -> set[str]:
        compat = module_name(path).startswith("expertctl.engine.torch.compat_")
        compat |= module_name(path) == "expertctl.train.model"
        return set() if compat else libraries(imported(path)) & COMPAT

    assert offenders(MODULES, heavy) == {}


def test_the_compat_engine_imports_what_replaces_our_own_only_when_it_runs() -> None:
    def at_once(path: Path) -> set[str]:
        return libraries(imported_at_once(path)) & COMPAT

    assert offenders(MODULES, at_once) == {}


def test_the_registry_server_needs_neither_the_engine_nor_the_command_line() -> None:
    allowed = {"errors", "digest", "reference", "files", "settings"}
    allowed |= {"schema", "http", "trust", "package", "registry"}

    def used(path: Path) -> set[str]:
        stages = {found for name in imported(path) if (found := stage(name))}
        return stages - allowed | libraries(imported(path)) & {"torch", "numpy", *COMPAT}

    assert offenders(SERVER, used) == {}


def test_only_the_command_line_imports_the_registry_server() -> None:
    def server(path: Path) -> set[str]:
        names = imported(path) if stage(module_name(path)) != "cli" else frozenset()
        return {name for name in names if name.split(".")[0] == "registry_server"}

    assert offenders(MODULES, server) == {}


def test_there_is_no_import_cycle() -> None:
    names = {module_name(path) for path in [*MODULES, *SERVER]}
    graph = {module_name(p): set(imported(p)) & names for p in [*MODULES, *SERVER]}
    while leaves := [name for name, targets in graph.items() if not targets]:
        for leaf in leaves:
            del graph[leaf]
        for targets in graph.values():
            targets.difference_update(leaves)
    packages = {path.parent for path in [*MODULES, *SERVER]}
    rest = {name for name in graph if ROOT.joinpath(*name.split(".")) not in packages}
    assert rest == set()


def test_stages_are_in_the_order_of_the_design() -> None:
    order = [
        "errors",
        "schema",
        "http",
        "trust",
        "package",
        "registry",
        "store",
        "routing",
        "install",
        "engine",
        "train",
        "server",
        "cli",
    ]
    assert all(LEVEL[a] < LEVEL[b] for a, b in pairwise(order))


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (
            ["--version"],
            {"torch", "httpx2", "numpy", "sqlite_utils", "cryptography", "jsonschema_rs"},
        ),
        (["list"], {"torch", "httpx2", "numpy", "sqlite_utils", "cryptography", "jsonschema_rs"}),
        (["keys", "list"], {"torch", "httpx2", "numpy", "sqlite_utils"}),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else " ".join(value),
)
def test_a_command_starts_without_the_libraries_of_others(
    words: list[str], absent: set[str], tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from expertctl.cli.app import run\n"
        f"code = run({words!r})\n"
        f"print(code, sorted({absent!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"EXPERT_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.splitlines()[-1] == "0 []"


PLAN_PROGRAM = """
import sys
import numpy as np
from expertctl.engine.adapters import experts
from expertctl.engine.adapters.compile import CompileSpec, WeightedAdapter, fold_plan
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import LoraTensors
from expertctl.engine.kernels.packed_format import PlanPacking, Scheme

module = "model.layers.0.self_attn.q_proj"
step = LoraTensors(np.ones((2, 16), np.float32), np.ones((16, 2), np.float32), 0.5)
adapter = LoadedAdapter("acme/x@1.0.0", {module: (step,)}, (), 2, 0)
spec = CompileSpec({module: (16, 16)}, 16, TARGET)
assert fold_plan([WeightedAdapter(adapter)], spec).compile().width
print(sorted({"torch", "numba"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("target", "imported"), [("None", []), ("PlanPacking(Scheme.FLOAT32)", ["numba"])]
)
def test_a_plan_is_compiled_without_libraries_that_it_does_not_need(
    target: str, imported: list[str]
) -> None:
    program = PLAN_PROGRAM.replace("TARGET", target)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{imported}\n"
