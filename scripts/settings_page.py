"""Write docs/reference/settings.md: every setting and every environment variable.

Run ``python -m scripts.settings_page`` in the root of the checkout.
"""

from pathlib import Path

from expertctl.cli.config import MEANINGS, read_settings
from expertctl.settings import CONFIG_KEYS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"
_BEFORE = """\
# Settings and environment variables

`expertctl config set KEY VALUE` writes a setting to `config.toml` in the home; `config list` shows
all of them, `config get` one, and `config unset` removes one. You may also edit the file: comments
stay. An option of a command takes precedence over the variable, and the variable over the file.
Keys that this version does not know are ignored with a warning, and refused by `config set`.

## Settings

| key | variable | default | meaning |
|---|---|---|---|
"""
_AFTER = """
Sizes are written `512MiB`, `2GB` or in bytes, times `12h`, `3d` or `2w`, booleans `true` or `false`
(also `yes` and `no`, `1` and `0`).

## Other variables

| variable | meaning |
|---|---|
| `EXPERT_HOME` | the home, where everything is stored; `~/.expert` if not set |
| `EXPERT_TOKEN`, `EXPERT_USER` | a login for the registry of `EXPERT_REGISTRY` |
| `EXPERT_API_KEY` | the key for `EXPERT_SERVER`, also of the [Python client](../how-to/serve.md) |
| `EXPERT_LOG_FORMAT` | `text` or `json`: how servers log; else text on a terminal |
| `EXPERT_REGISTRY_DATA` | a registry's folder for [other servers](../how-to/run-a-registry.md) |
| `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY` | [proxies](../how-to/registries.md) |
| `HF_TOKEN`, `HF_ENDPOINT` | the token, and the address of a [hub](../how-to/download-bases.md) |
| `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME` | its cache: bases and MiniLM weights |
| `HUGGINGFACE_HUB_CACHE` | the same as `HF_HUB_CACHE`, which comes first |
| `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE` | send nothing to a hub |
| `HF_HUB_DOWNLOAD_TIMEOUT` | the seconds without a byte after which a download is opened again |
| `OMP_NUM_THREADS` | the most threads that the engine uses |
| `SOURCE_DATE_EPOCH` | the time that `build` writes into packages |
| `COLUMNS` | the width of the terminal, instead of what it says |
| `NO_COLOR`, `FORCE_COLOR`, `TERM` | whether messages are coloured; `--color` decides before them |
| `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_…` | where [traces of `serve`](../how-to/serve.md) are sent |

A registry server has settings of its own, in [`registry.toml`](registry-toml.md).
"""


def build_page() -> str:
    """Return the text of the page."""
    rows = (
        f"| `{setting.key}` | `{CONFIG_KEYS[setting.key]}` | {setting.describe_default()} "
        f"| {MEANINGS[setting.key]} |\n"
        for setting in read_settings(Path("no such file"), {})
    )
    return _BEFORE + "".join(rows) + _AFTER


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
