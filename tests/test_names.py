"""Names use the field's terms: no word of ``words.txt``, and one meaning for each class name."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path for package in ("expertctl", "registry_server") for path in (ROOT / package).rglob("*.py")
)
WORDS = {
    line
    for line in (ROOT / "tests" / "words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
PUBLIC = {"demand_result"}
"""Methods of the client SDK, whose names its users rely on."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions(path: Path) -> list[tuple[type, str]]:
    """The kind and name of every class and function of a module, nested ones included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(type(node), node.name) for node in ast.walk(tree) if isinstance(node, Definition)]


def split_words(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_are_split_into_words() -> None:
    assert split_words("_demand_XMLReader2") == {"demand", "xml", "reader"}


def test_no_listed_word_names_a_module_a_function_or_a_class() -> None:
    assert len(WORDS) > 40
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for name in (path.stem, *(name for _, name in definitions(path)))
        if name not in PUBLIC and split_words(name) & WORDS
    ]
    assert found == []


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        name for path in MODULES for kind, name in definitions(path) if kind is ast.ClassDef
    )
    assert [name for name, count in names.items() if count > 1] == []
