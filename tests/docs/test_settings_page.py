"""The page of the settings has all of them, with what the code says."""

import re
from pathlib import Path

from expertctl.cli.config import MEANINGS
from expertctl.settings import CONFIG_KEYS
from scripts.settings_page import PAGE, build_page

ROOT = Path(__file__).parent.parent.parent
_VARIABLE = re.compile(r"""["']EXPERT_[A-Z_]+["']""")


def test_the_page_is_the_one_that_the_settings_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == build_page(), "run `python -m scripts.settings_page`"
    assert list(MEANINGS) == list(CONFIG_KEYS)


def test_every_variable_that_the_code_names_is_on_the_page() -> None:
    files = [path for name in ("expertctl",) for path in (ROOT / name).rglob("*.py")]
    found = {name[1:-1] for path in files for name in _VARIABLE.findall(path.read_text("utf-8"))}
    assert found > set(CONFIG_KEYS.values())
    page = build_page()
    assert [name for name in sorted(found) if f"`{name}`" not in page] == []
