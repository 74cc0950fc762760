"""The page of the settings has all of them, with what the code says."""

import re
from pathlib import Path

from expertctl.cli.config import MEANINGS
from expertctl.settings import CONFIG_KEYS
from scripts.settings_page import PAGE, build_page

ROOT = Path(__file__).parent.parent.parent
_VARIABLE = re.compile(
    r"""["'](EXPERT_[A-Z_]+)["']|environ(?:ment)?(?:\.get\(|\[)["']([A-Z_]+)["']"""
)
_OF_OTHERS = {
    *("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_OFFLINE"),  # we set them
    "WT_SESSION",  # Windows' terminal sets it
    *("COMP_WORDS", "COMP_CWORD"),  # bash sets them
}


def test_the_page_is_the_one_that_the_settings_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == build_page(), "run `python -m scripts.settings_page`"
    assert list(MEANINGS) == list(CONFIG_KEYS)


def test_every_variable_that_the_code_names_is_on_the_page() -> None:
    modules = [p for name in ("expertctl", "registry_server") for p in (ROOT / name).rglob("*.py")]
    texts = [path.read_text("utf-8") for path in modules]
    found = {one or other for text in texts for one, other in _VARIABLE.findall(text)}
    assert found > set(CONFIG_KEYS.values())
    page = build_page()
    assert [name for name in sorted(found - _OF_OTHERS) if f"`{name}`" not in page] == []
