"""Every command shown in a page works, and prints what the page says."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.console_blocks import ConsoleCommand, matches_output, read_commands, run_commands
from tests.docs.forkserver import run_fork_server
from tests.factories import write_base, write_lora, write_soft_prompt

pytestmark = pytest.mark.all

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
STAGES = "cli|engine|install|package|registry|routing|schema|store|trust"
LONG = {
    *("tutorial.md", "evaluate.md", "evaluate-routing.md", "measure.md", "train.md"),
    *("tutorial-registry.md", "install-from-a-registry.md", "serve.md"),
}
"""These train, or measure, for half a minute and more, or run servers."""
RUNNABLE = [
    pytest.param(page, marks=[pytest.mark.all] if page.name in LONG else [])
    for page in PAGES
    if read_commands(page)
]


WHOLE = {"README.md"}
"""Every command of these is a process of its own; the others are copies of one, see `zygote`."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a command that need not import anything."""
    with run_fork_server(tmp_path_factory.mktemp("warm")) as folder:
        yield folder


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder as the pages assume it: the checkout's examples, a base and adapters for it."""
    folder = tmp_path / "work"
    folder.mkdir()
    write_base(folder / "my-base")
    write_lora(folder / "my-lora", folder / "my-base")
    write_soft_prompt(folder / "my-prompt", folder / "my-base")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_of_a_page_works_as_shown(page: Path, workplace: Path, warm: Path) -> None:
    folders = (
        [Path(sys.executable).parent] if page.name in WHOLE else [warm, Path(sys.executable).parent]
    )
    environment = {
        "PATH": ":".join(map(str, [*folders, os.environ["PATH"]])),
        "HOME": str(workplace.parent),
        "OMP_NUM_THREADS": "1",
    }
    steps = [step for step in read_commands(page) if not step.command.startswith("make ")]
    assert run_commands(steps, folder=workplace, environment=environment, limit_s=2400) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_inside_the_project_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    """``package/read``, ``package/read.py`` and ``trust.trust_store.TrustStore`` name modules."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(rf"(?<![\w/.])({STAGES})/([a-z_]+)(?:\.py)?(?![\w/.])", text)
    owners = re.findall(rf"`({STAGES})\.([a-z_]+)\.([A-Z]\w+)`", text)
    modules = {(stage, module, "") for stage, module in names} | set(owners)
    assert [name for name in sorted(modules) if not is_there(*name)] == []


def is_there(stage: str, module: str, value: str) -> bool:
    path = ROOT / "expertctl" / stage / f"{module}.py"
    return path.is_file() and (not value or f"class {value}" in path.read_text(encoding="utf-8"))


def test_a_module_that_is_not_there_is_noticed() -> None:
    assert is_there("trust", "trust_store", "TrustStore")
    assert not is_there("trust", "trust_store", "TrustShop")
    assert not is_there("package", "sign", "")


def test_the_comparison_of_transcripts_notices_a_difference() -> None:
    assert matches_output(("a … c", "…", "d"), ["a b c", "x", "y", "d"])
    assert not matches_output(("a", "b"), ["a"])
    assert not matches_output(("a [x]",), ["a x"])


def test_a_failing_command_is_reported(tmp_path: Path) -> None:
    steps = [
        ConsoleCommand("true", ()),
        ConsoleCommand("false", ()),
        ConsoleCommand("echo hi", ("ho",)),
    ]
    problems = run_commands(
        steps, folder=tmp_path, environment={"PATH": os.environ["PATH"]}, limit_s=10
    )
    assert [p.splitlines()[0] for p in problems] == ["$ false", "$ echo hi"]
