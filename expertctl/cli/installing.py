"""``expertctl install``, ``import``, ``remove``, ``reindex``: change what is installed."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.local import expert_document
from expertctl.cli.near_packages import suggest_names
from expertctl.cli.output import JsonFlag, emit, human_size, note, note_once, progress, warn
from expertctl.errors import NotFoundError, UsageError
from expertctl.install.disagreement import Need
from expertctl.install.fetch import Lend
from expertctl.install.install import install_set
from expertctl.install.locked import install_locked
from expertctl.install.notices import Notice
from expertctl.install.order import Done, Order, Target, install_order
from expertctl.install.publication import Installed
from expertctl.install.reindex import reindex as make_again
from expertctl.install.release_age import ReleaseAge
from expertctl.install.remove import remove_expert
from expertctl.install.sources import Sources, open_sources
from expertctl.install.worklist import (
    Worklist,
    check_list,
    find_worklist,
    install_list,
    lock_list,
    resolve_list,
    user_list,
)
from expertctl.package.read import names_file
from expertctl.reference import ANY, PackageName, Reference
from expertctl.routing.encoder import open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.settings import Home, Settings, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.flags import Flagged, read_flagged
from expertctl.store.preference import read_preference, usage_of, working_folder
from expertctl.store.signers import Signers, read_signers
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore

AllowUnsigned = Annotated[
    bool, typer.Option("--allow-unsigned", help="Accept packages that nobody signed.")
]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Accept another base of the same name.")
]
AcceptChanged = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-changed",
        metavar="NAME@VERSION",
        help="Take another content for this version than it had before.",
    ),
]
Locked = Annotated[
    bool, typer.Option("--locked", help="Install exactly what expert.lock says, or fail.")
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Use what is here and what registries said last.")
]


def install(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="REF|FILE", help="References and .expert files, mixed."),
    ] = None,
    locked: Locked = False,
    offline: Offline = False,
    save: Annotated[
        bool, typer.Option("--save", help="Write the references to the project's experts.toml.")
    ] = False,
    allow_unsigned: AllowUnsigned = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Install experts and what they require. All that are given count together, all or none.

    Without arguments: what experts.toml in this folder wants, else your own list.

    Example: expertctl install acme/sql@^1.2 english.expert
    """
    settings = opened_settings(offline=offline)
    target = target_of(
        settings,
        unsigned=allow_unsigned,
        mismatch=allow_base_mismatch,
        accept_changed=accept_changed or (),
    )
    worklist = find_worklist(settings.home, Path.cwd())
    references, files = sort_targets(targets or [])
    _check_call(worklist, references, files, locked=locked, save=save)
    with open_sources(settings, target.trust, tell=note_once()) as sources:
        lend = lender("installing", as_json=as_json)
        if locked:
            done = install_locked(worklist, references, target, sources, lend)
        elif references or files:
            done = _installed(
                worklist, references, files, target, sources, settings, lend, save=save
            )
        else:
            done, _ = install_list(worklist, target, sources, lend, age_of(settings))
    done = replace(done, notes=(*done.notes, *_unused(done.installed, settings.home)))
    learnt = documents_of_learnt(done, sources)
    if worklist.is_project and references and not (save or locked):
        note(f"{worklist.file.path.name} stays as it is; --save writes there what you asked for")
    say_notices(done)
    say_notes(done, target)
    document = {"installed": documents_of(done.installed, settings.home), **learnt}
    emit(document, "\n".join(_line(item) for item in done.installed), as_json=as_json)


def _installed(
    worklist: Worklist,
    references: Sequence[Reference],
    files: Sequence[Path],
    target: Target,
    sources: Sources,
    settings: Settings,
    lend: Lend,
    *,
    save: bool,
) -> Done:
    """Install what was named, and write down the references."""
    needs = tuple(Need(reference, "you", by_hand=True) for reference in references)
    lock = worklist.lock()
    order = Order(needs, tuple(files), lock.experts if lock else (), age_of(settings))
    try:
        if save and not files:  # what files bring is known only once they are installed
            _check_saved(worklist, references, target, sources, settings)
        done = install_order(order, target, sources, lend)
    except NotFoundError as error:
        raise suggest_names(error, references, sources, target.store) from error
    return _recorded(worklist, references, done, target, sources, settings, save=save)


def _unused(installed: Iterable[Installed], home: Home) -> Iterator[str]:
    """Say of new versions that another one is used all the same where no version is named."""
    preference, experts = read_preference(home, working_folder()), Store(home.store).experts()
    for item in installed:
        usage = usage_of(item.expert, experts, preference)
        if item.outcome == "installed" and usage.used_instead is not None:
            yield (
                f"{item.expert.ref} is used only where it is named; else {usage.used_instead} is, "
                f"`expertctl why {usage.used_instead}` says why"
            )


def _check_call(
    worklist: Worklist,
    references: Sequence[Reference],
    files: Sequence[Path],
    *,
    locked: bool,
    save: bool,
) -> None:
    """Refuse options that contradict each other."""
    if (locked or save) and not worklist.is_project:
        flag = "--locked" if locked else "--save"
        hint = "`expertctl lock` needs an experts.toml, too"
        raise UsageError(f"{flag} needs an experts.toml in this folder", hint=hint)
    if locked and (files or save):
        raise UsageError(
            "--locked installs what is locked: no files, no --save",
            hint="`expertctl lock` writes expert.lock again",
        )
    if save and not references:
        raise UsageError(
            "--save writes references, and there are none", hint="expertctl install acme/sql --save"
        )


def _check_saved(
    worklist: Worklist,
    references: Sequence[Reference],
    target: Target,
    sources: Sources,
    settings: Settings,
) -> None:
    """Refuse references with which the project could not be locked, before any is installed."""
    project = worklist.file.read().with_wanted(references)
    resolved = resolve_list(worklist, target, sources, age_of(settings), project=project)
    check_list(resolved, target, sources)


def _recorded(
    worklist: Worklist,
    references: Sequence[Reference],
    done: Done,
    target: Target,
    sources: Sources,
    settings: Settings,
    *,
    save: bool,
) -> Done:
    """Write down what was asked for: with --save in the project, else in the user's own list."""
    wanted = {reference.package: reference for reference in references}
    if not wanted:
        return done
    if save:
        worklist.file.save(wanted)
        resolved = resolve_list(worklist, target, sources, age_of(settings))
        notices = dict.fromkeys([*done.notices, *check_list(resolved, target, sources)])
        lock_list(worklist, resolved)
        sources.accept_contents(resolved.chosen, target.accept_changed)
        notes = (*done.notes, *resolved.notes, *_kept_exactly(references, worklist))
        return replace(done, notes=notes, notices=tuple(notices))
    if worklist.is_project:
        return done
    worklist.file.save(wanted)
    return replace(done, notes=(*done.notes, *_kept_exactly(references, worklist)))


def _kept_exactly(references: Iterable[Reference], worklist: Worklist) -> Iterator[str]:
    """Say of exact references that they stay in the list, and how to follow newer versions."""
    save = " --save" if worklist.is_project else ""
    for reference in references:
        exact = reference.digest or reference.constraint.pinned
        if exact is not None:
            follow = replace(reference, constraint=ANY, digest=None)
            yield (
                f"{worklist.file.path} names exactly {exact}: `expertctl update` keeps it, "
                f"`expertctl install {follow}{save}` follows newer versions"
            )


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `expertctl export` made.")],
    allow_unsigned: AllowUnsigned = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Install experts that were exported together. All are verified first.

    Example: expertctl import mine.experts
    """
    settings = load_settings()
    home = settings.home
    lock = find_worklist(home, Path.cwd()).lock()
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
            accept_changed=frozenset(map(_exact_version, accept_changed or ())),
            locked=lock.contents if lock else {},
            progress=report,
        )
    warn(warning for item in installed for warning in item.warnings)
    _say(catalogue)
    document = {"installed": documents_of(installed, home), "notes": []}
    emit(document, "\n".join(_line(item) for item in installed), as_json=as_json)


def remove(
    ref: Annotated[str, typer.Argument(metavar="REF", help="An expert, or sha256:… of one.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also when other experts require it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove an installed expert. Files that nothing else needs go with it.

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
    _forget(removed.ref, settings.home)
    document = {"removed": removed.ref, "freed": removed.freed.size}
    emit(
        document, f"removed {removed.ref}, freed {human_size(removed.freed.size)}", as_json=as_json
    )


def reindex(as_json: JsonFlag = False) -> None:
    """Rebuild the catalogue and the routing vectors. Both come from what is installed.

    Example: expertctl reindex
    """
    settings = load_settings()
    catalogue = Catalogue(settings.home.index)
    done = make_again(Store(settings.home.store), catalogue=catalogue, index=_index(settings))
    warn(done.warnings)
    _say(catalogue)
    document = {"experts": done.experts, "warnings": list(done.warnings)}
    emit(document, f"indexed {done.experts} experts", as_json=as_json)


def _forget(ref: str, home: Home) -> None:
    """Take an expert out of the user's own list when no version of it is left."""
    package = PackageName.parse(ref.partition("@")[0])
    if not any(expert.package == package for expert in Store(home.store).experts()):
        user_list(home).file.drop(package)


def opened_settings(*, offline: bool) -> Settings:
    """Return the settings, combined with the ``--offline`` flag of a command."""
    settings = load_settings()
    return replace(settings, offline=settings.offline or offline)


def target_of(
    settings: Settings,
    *,
    unsigned: bool = False,
    mismatch: bool = False,
    accept_changed: Iterable[str] = (),
) -> Target:
    """Return where experts are installed to, and what the user tolerates."""
    home = settings.home
    return Target(
        Store(home.store),
        BaseStore(home.bases),
        TrustStore(home.trust),
        home.registries,
        catalogue=Catalogue(home.index),
        index=_index(settings),
        allow_unsigned=unsigned,
        allow_base_mismatch=mismatch,
        accept_changed=frozenset(map(_exact_version, accept_changed)),
    )


def _exact_version(text: str) -> str:
    """Return ``namespace/name@version`` of a reference that names one version."""
    reference = Reference.parse(text)
    if reference.constraint.pinned is None or reference.registry is not None:
        hint = "for example --accept-changed acme/sql@1.2.0"
        fact = "--accept-changed takes one exact version, without a registry"
        raise UsageError(f"{text}: {fact}", hint=hint)
    return f"{reference.package}@{reference.constraint.pinned}"


def age_of(settings: Settings) -> ReleaseAge:
    """Return the minimum age of a version, counted from now."""
    return ReleaseAge.starting_now(
        settings.minimum_release_age, settings.minimum_release_age_exclude
    )


def lender(label: str, *, as_json: bool) -> Lend:
    """Return a function that opens a progress bar for a number of bytes."""
    return lambda total: progress(label, total, as_json=as_json)


def sort_targets(texts: Sequence[str]) -> tuple[list[Reference], list[Path]]:
    """Separate references from files; a text that is neither counts as a missing file."""
    references: list[Reference] = []
    files: list[Path] = []
    for text in texts:
        try:
            files += [Path(text)] if names_file(text) else []
            references += [] if names_file(text) else [Reference.parse(text)]
        except UsageError as error:
            if "@" in text or "/" in text.strip("/"):
                raise
            raise _neither(text) from error
    return references, files


def _neither(text: str) -> NotFoundError:
    """Return the error for a word that is neither a reference nor a file."""
    shown = text if text.isprintable() and len(text) <= 80 else f"{text[:80]!r}"
    hint = "references look like acme/sql, files like sql.expert"
    if text.isprintable() and len(text) <= 80:
        hint = f"`expertctl search {shlex.quote(text)}` finds experts; {hint}"
    return NotFoundError(f"{shown} is not namespace/name, and there is no such file", hint=hint)


def _index(settings: Settings) -> RoutingIndex:
    return RoutingIndex(settings.home.root, open_encoder(settings.encoder, home=settings.home))


def say_notices(done: Done) -> None:
    """Warn of what was installed, and of what registries say against anything chosen."""
    warnings = [warning for item in done.installed for warning in item.warnings]
    warn(dict.fromkeys([*warnings, *(notice.text for notice in done.notices)]))


def documents_of_learnt(done: Done, sources: Sources) -> dict[str, object]:
    """Return what an install learnt, as ``--json`` shows it; the pinned keys were told before."""
    return {
        "notes": [*sources.told, *done.notes],
        "notices": [document_of_notice(notice) for notice in done.notices],
        "pinned": [
            {
                "registry": key.registry,
                "namespace": key.namespace,
                "key_id": key.key_id,
                "vouched": key.vouched,
            }
            for key in sources.pinned
        ],
    }


def document_of_notice(notice: Notice) -> dict[str, object]:
    """Return a notice as ``--json`` shows it."""
    return {
        "kind": notice.kind,
        "ref": notice.ref,
        "registry": notice.registry,
        "message": notice.message,
        "hint": notice.hint,
        "in_use": notice.in_use,
        "contents": [
            {"source": c.source, "content_digest": str(c.digest), "signers": list(c.signers)}
            for c in notice.contents
        ],
    }


def say_notes(done: Done, target: Target) -> None:
    """Say what is worth knowing beside the result."""
    for text in (*done.notes, *(target.catalogue.notes if target.catalogue else ())):
        note(text)


def documents_of(installed: Sequence[Installed], home: Home) -> list[dict[str, object]]:
    """Return what was installed as ``--json`` shows it."""
    signers, flagged = read_signers(home.trust), read_flagged(home.flagged)
    return [_document(item, signers, flagged) for item in installed]


def _say(catalogue: Catalogue) -> None:
    for text in catalogue.notes:
        note(text)


def _document(item: Installed, signers: Signers, flagged: Flagged) -> dict[str, object]:
    shown = expert_document(item.expert, signers, flagged)
    return {**shown, "outcome": item.outcome, "warnings": list(item.warnings)}


def _line(item: Installed) -> str:
    return f"{item.outcome}: {item.expert.ref}  {item.expert.content_digest}"
