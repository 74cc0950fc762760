"""Every claim names a command that exists in this repository."""

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_README_LINES = 80


def test_every_command_names_tests_and_modules_that_are_there() -> None:
    commands = re.findall(r"`(?:\.venv/bin/)?python -m ([^`…]+)`", PAGE)
    assert len(commands) > 15
    for command in commands:
        module, *words = command.split()
        assert find_spec(module), command
        paths = [word for word in words if module == "pytest" and "/" in word]
        assert [path for path in paths if not (ROOT / path).exists()] == [], command
        named = words[:1] if module == "benchmarks" else []
        assert [n for n in named if not (ROOT / "benchmarks" / f"{n}.py").is_file()] == [], command
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", PAGE)) <= targets


def test_the_readme_is_short_and_leads_to_five_pages() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\(docs/[^)]+\.md\)", README)) == 5
