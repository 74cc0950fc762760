"""``expertctl install``, ``import``, ``remove``, ``reindex``: what changes what is installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.local import expert_document
from expertctl.cli.output import JsonFlag, emit, human_size, note, progress, warn
from expertctl.errors import NotFoundError, UsageError
from expertctl.install.install import Installed, install_files, install_set
from expertctl.install.reindex import reindex as make_again
from expertctl.install.remove import remove_expert
from expertctl.reference import Reference
from expertctl.routing.encoder import open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.settings import Home, Settings, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.signers import Signers, read_signers
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore

AllowUnsigned = Annotated[
    bool, typer.Option("--allow-unsigned", help="Accept packages that nobody signed.")
]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Accept another base of the same name.")
]


def install(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help=".expert files.")],
    allow_unsigned: AllowUnsigned = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    as_json: JsonFlag = False,
) -> None:
    """Verify and install experts. All that are given count together, all or none.

    Example: expertctl install sql.expert english.expert
    """
    settings = load_settings()
    home = settings.home
    paths = [_file(text) for text in files]
    catalogue, size = Catalogue(home.index), sum(p.stat().st_size for p in paths if p.is_file())
    with progress("installing", size, as_json=as_json) as report:
        installed = install_files(
            paths,
            store=Store(home.store),
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            catalogue=catalogue,
            index=_index(settings),
            allow_unsigned=allow_unsigned,
            allow_base_mismatch=allow_base_mismatch,
            progress=report,
        )
    _tell(installed, catalogue, home, as_json=as_json)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `expertctl export` made.")],
    allow_unsigned: AllowUnsigned = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    as_json: JsonFlag = False,
) -> None:
    """Install experts that were exported together. All are verified first.

    Example: expertctl import mine.experts
    """
    settings = load_settings()
    home = settings.home
    catalogue, size = Catalogue(home.index), file.stat().st_size if file.is_file() else None
    with progress("importing", size, as_json=as_json) as report:
        installed = install_set(
            file,
            store=Store(home.store),
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            catalogue=catalogue,
            index=_index(settings),
            allow_unsigned=allow_unsigned,
            allow_base_mismatch=allow_base_mismatch,
            progress=report,
        )
    _tell(installed, catalogue, home, as_json=as_json)


def remove(
    ref: Annotated[str, typer.Argument(metavar="REF", help="An expert, or sha256:… of one.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also when other experts require it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove an installed expert and the files that nothing else needs.

    Example: expertctl remove acme/sql@1.0.0
    """
    settings = load_settings()
    catalogue = Catalogue(settings.home.index)
    removed = remove_expert(
        ref,
        store=Store(settings.home.store),
        catalogue=catalogue,
        index=_index(settings),
        force=force,
    )
    warn(removed.warnings)
    _say(catalogue)
    document = {"removed": removed.ref, "freed": removed.freed.size}
    emit(
        document, f"removed {removed.ref}, freed {human_size(removed.freed.size)}", as_json=as_json
    )


def reindex(as_json: JsonFlag = False) -> None:
    """Make the catalogue and the routing vectors again. Both come from what is installed.

    Example: expertctl reindex
    """
    settings = load_settings()
    catalogue = Catalogue(settings.home.index)
    done = make_again(Store(settings.home.store), catalogue=catalogue, index=_index(settings))
    warn(done.warnings)
    _say(catalogue)
    document = {"experts": done.experts, "warnings": list(done.warnings)}
    emit(document, f"indexed {done.experts} experts", as_json=as_json)


def _file(text: str) -> Path:
    """Return the file that is meant; a reference would need a registry."""
    path = Path(text)
    if path.exists() or text.endswith(".expert"):
        return path
    try:
        Reference.parse(text)
    except UsageError:
        return path
    hint = "get its .expert file, then `expertctl install FILE`"
    raise NotFoundError(f"{text}: there is no such file, and no registry is set up", hint=hint)


def _index(settings: Settings) -> RoutingIndex:
    return RoutingIndex(settings.home.root, open_encoder(settings.encoder))


def _tell(
    installed: Sequence[Installed], catalogue: Catalogue, home: Home, *, as_json: bool
) -> None:
    warn(warning for item in installed for warning in item.warnings)
    _say(catalogue)
    signers = read_signers(home.trust)
    document = {"installed": [_document(item, signers) for item in installed]}
    emit(document, "\n".join(_line(item) for item in installed), as_json=as_json)


def _say(catalogue: Catalogue) -> None:
    for text in catalogue.notes:
        note(text)


def _document(item: Installed, signers: Signers) -> dict[str, object]:
    shown = expert_document(item.expert, signers)
    return {**shown, "outcome": item.outcome, "warnings": list(item.warnings)}


def _line(item: Installed) -> str:
    return f"{item.outcome}: {item.expert.ref}  {item.expert.content_digest}"
