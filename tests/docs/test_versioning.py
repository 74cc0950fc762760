"""The numbers of formats on the page about versions are those of the code."""

import json
import re
from pathlib import Path

import expertctl
from expertctl.engine.moe.usage_store import USAGE_VERSION
from expertctl.install.project_file import FORMAT
from expertctl.package.tokenizer import FORM_VERSION
from expertctl.server import api_keys
from expertctl.store import index_database
from registry_server.operation.backup import BACKUP_FORMAT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")


def test_the_numbers_of_formats_are_those_of_the_code() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    stated = {row[0].removeprefix("| "): re.findall(r"\b\d+\b", row[1])[-1:] for row in rows}
    schemas = {
        json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text("utf-8"))["properties"][
            "schema"
        ]["const"]
        for name in ("manifest", "index", "trust")
    }
    assert len(schemas) == 1
    expected = {
        "`.expert` packages": schemas.pop(),
        "[`expert.lock`]": FORMAT,
        "records of bases": FORM_VERSION,
        "usage and ratings": index_database._LAYOUT_VERSION,
        "which routed experts": USAGE_VERSION,
        "API keys": api_keys._FORMAT,
        "backups": BACKUP_FORMAT,
    }
    for start, number in expected.items():
        found = [numbers for subject, numbers in stated.items() if subject.startswith(start)]
        assert found == [[str(number)]], start


def test_the_version_is_that_of_the_program() -> None:
    assert f"no release yet: {expertctl.__version__} " in " ".join(PAGE.split())
