"""The place of a base as the user named it: a directory, and what it is called."""

from pathlib import Path
from urllib.parse import quote

from expertctl.errors import NotFoundError, UsageError

_PLACES = {"..", "~"}
"""What begins a path, and never the name of a model on a hub."""
_MAX_NAME = 200


def check_directory(directory: Path) -> None:
    """Demand that it is a directory.

    Raises:
        UsageError: when it is something else.
        NotFoundError: when it does not exist.
    """
    if directory.is_dir():
        return
    if directory.exists():
        raise UsageError(f"{directory} is no directory", hint="give the folder of config.json")
    model = directory if _may_be_of_a_hub(directory) else "ORG/NAME"
    hint = f"download it first: `hf download {model} --local-dir DIR`, then base add DIR"
    raise NotFoundError(f"{directory}: no such directory", hint=hint)


def named(directory: Path, name: str | None, revision: str | None) -> tuple[str, str | None]:
    """Fill in what the path in a hub cache tells: ``models--org--name/snapshots/<commit>``.

    Raises:
        UsageError: when what it is called cannot name a base.
    """
    place = directory.resolve()
    if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
        name = name or place.parent.parent.name.removeprefix("models--").replace("--", "/")
        revision = revision or place.name
    name = name or place.name
    shown = name.isprintable() and name.strip() == name and name[:1] not in {"", "."}
    if not shown or len(quote(name, safe="")) > _MAX_NAME:
        raise UsageError(f"{name[:80]!r} cannot name a base", hint="choose one with `--name NAME`")
    return name, revision


def _may_be_of_a_hub(place: Path) -> bool:
    """Tell whether a text that is no directory may be meant as the name of a model on a hub."""
    return 0 < len(place.parts) <= 2 and not place.is_absolute() and place.parts[0] not in _PLACES
