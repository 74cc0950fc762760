import re
from pathlib import Path

from registry_server.errors import STATUS_BY_CODE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "registry-server.md"


def test_every_error_code_is_in_the_reference_with_its_status() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\d{3}) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {code: int(status) for code, status in rows} == STATUS_BY_CODE
    assert len(rows) == len(STATUS_BY_CODE)
