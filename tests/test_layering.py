"""Imports point one way, and what must start without torch does."""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors"},
    {"client"},
    {"digest", "reference", "settings", "durable", "config_file", "regular_file", "telling"},
    {"schema"},
    {"http"},
    {"trust"},
    {"package"},
    {"registry"},
    {"store"},
    {"routing"},
    {"install"},
    {"engine"},
    {"server"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
COMPAT = {"transformers", "peft"}
SERVER = sorted((ROOT / "registry_server").rglob("*.py"))
MODULES = sorted((ROOT / "expertctl").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def stage(module: str) -> str | None:
    """The stage of an ``expertctl`` module, None for any other and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "expertctl" and len(parts) > 1 and parts[1] in LEVEL else None


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_only_earlier_stages(path: Path) -> None:
    own = stage(module_name(path))
    if own is None:
        assert path.name == "__init__.py"
        return
    later = {name for name in imported(path) if (s := stage(name)) and LEVEL[s] > LEVEL[own]}
    assert later == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_engine_imports_torch(path: Path) -> None:
    heavy = {n.split(".")[0] for n in imported(path)} & {"torch", "transformers", "peft"}
    assert heavy <= ({"torch", *COMPAT} if stage(module_name(path)) == "engine" else set())


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_compat_engine_imports_what_replaces_our_own_and_only_when_it_runs(
    path: Path,
) -> None:
    module = module_name(path)
    heavy = {n.split(".")[0] for n in imported(path)} & COMPAT
    assert heavy <= (COMPAT if module.startswith("expertctl.engine.compat") else set())
    top = ast.parse(path.read_text(encoding="utf-8")).body
    names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in top if isinstance(n, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & COMPAT


@pytest.mark.parametrize("path", SERVER, ids=module_name)
def test_the_registry_server_needs_neither_the_engine_nor_the_command_line(path: Path) -> None:
    used = {stage(name) for name in imported(path)} - {None}
    assert used <= {"errors", "digest", "reference", "durable", "settings", "regular_file",
                    "schema", "http", "trust", "package", "registry"}  # fmt: skip
    assert not {n.split(".")[0] for n in imported(path)} & {"torch", "numpy", *COMPAT}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_command_line_imports_the_registry_server(path: Path) -> None:
    server = {name for name in imported(path) if name.split(".")[0] == "registry_server"}
    assert not server or stage(module_name(path)) == "cli"


def test_there_is_no_import_cycle() -> None:
    names = {module_name(path) for path in [*MODULES, *SERVER]}
    graph = {module_name(p): {n for n in imported(p) if n in names} for p in [*MODULES, *SERVER]}
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
