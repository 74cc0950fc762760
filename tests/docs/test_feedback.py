"""The page on feedback names every key of ``stats --json``, and no other."""

import json
import re
from pathlib import Path

from expertctl.schema.validation import find_schema

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "feedback.md"


def test_every_key_of_the_document_has_its_place_and_every_row_a_key() -> None:
    schema = json.loads(find_schema("stats").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(schema["properties"])
