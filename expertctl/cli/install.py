"""``expertctl install``, ``import``, ``remove`` and ``reindex``: change what is installed."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.build_inputs import convert_adapters, split_hub_names
from expertctl.cli.completion import complete_experts, complete_packages
from expertctl.cli.connection import add_package_suggestions
from expertctl.cli.installed import build_expert_document
from expertctl.cli.output import JsonFlag, emit, make_note_once, note, print_message, warn
from expertctl.cli.progress import show_progress
from expertctl.errors import NotFoundError, UsageError
from expertctl.install.candidate import ReleaseAge, Requirement
from expertctl.install.doctor import reindex as make_again
from expertctl.install.fetch import OpenProgress
from expertctl.install.installed_experts import remove_expert
from expertctl.install.installer import InstallContext, install_set
from expertctl.install.notices import Notice
from expertctl.install.publication import InstalledPackage
from expertctl.install.request import InstallReport, InstallRequest, install_request
from expertctl.install.requirement_list import (
    RequirementList,
    check_requirement_list,
    find_requirement_list,
    install_locked,
    install_requirement_list,
    lock_requirement_list,
    resolve_requirement_list,
    user_requirement_list,
)
from expertctl.install.sources import RegistrySources, open_sources
from expertctl.package.read import is_file_name
from expertctl.reference import ANY, PackageName, Reference
from expertctl.routing.encoder import open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.settings import Home, Settings, format_size, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.preference import (
    FlagsByDigest,
    SignerNames,
    describe_version_usage,
    find_working_folder,
    read_flags,
    read_preference,
    read_signers,
)
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

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
        help="Accept that the content of this version changed.",
    ),
]
Locked = Annotated[
    bool, typer.Option("--locked", help="Install exactly the versions of expert.lock, or fail.")
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Use only local files and the last known state of registries."),
]


def install(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF|FILE|hf:ORG/NAME",
            autocompletion=complete_packages,
            help="References, .expert files, and adapters of a hub, mixed.",
        ),
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
    """Install experts and what they require. They are resolved together, and all or none installed.

    Without arguments, installs the experts.toml of this folder, else your own list. An adapter of a
    hub is converted into a package, which your key hf signs.

    Example: expertctl install acme/sql@^1.2 english.expert
    """
    settings = load_command_settings(offline=offline)
    target = build_install_context(
        settings,
        unsigned=allow_unsigned,
        mismatch=allow_base_mismatch,
        accept_changed=accept_changed or (),
    )
    worklist = find_requirement_list(settings.home, Path.cwd())
    adapters, others = split_hub_names(targets or [])
    references, files = split_targets(others)
    _check_options(worklist, references, [*files, *map(str, adapters)], locked=locked, save=save)
    with (
        convert_adapters(adapters, settings, as_json=as_json) as converted,
        open_sources(settings, target.trust, notify=make_note_once()) as sources,
    ):
        files += converted
        open_progress = make_progress_factory("installing", as_json=as_json)
        if locked:
            done = install_locked(worklist, references, target, sources, open_progress)
        elif adapters and not (references or files):
            done = InstallReport((), ())
        elif references or files:
            done = _install_named(
                worklist, references, files, target, sources, settings, open_progress, save=save
            )
        else:
            done, _ = install_requirement_list(
                worklist, target, sources, open_progress, get_release_age(settings)
            )
    done = replace(done, notes=(*done.notes, *_describe_unused(done.installed, settings.home)))
    learnt = build_findings_document(done, sources)
    if worklist.is_project and references and not (save or locked):
        note(f"{worklist.file.path.name} is unchanged; --save adds what you asked for")
    print_notices(done)
    print_notes(done, target)
    document = {"installed": build_installed_documents(done.installed, settings.home), **learnt}
    emit(document, "\n".join(_format_installed(item) for item in done.installed), as_json=as_json)


def _install_named(
    worklist: RequirementList,
    references: Sequence[Reference],
    files: Sequence[Path],
    target: InstallContext,
    sources: RegistrySources,
    settings: Settings,
    open_progress: OpenProgress,
    *,
    save: bool,
) -> InstallReport:
    """Install what was named, and write down the references."""
    needs = tuple(Requirement(reference, "you", by_hand=True) for reference in references)
    lock = worklist.load_lock()
    order = InstallRequest(
        needs, tuple(files), lock.experts if lock else (), get_release_age(settings)
    )
    try:
        if save and not files:  # what files bring is known only once they are installed
            _check_lockable(worklist, references, target, sources, settings)
        done = install_request(order, target, sources, open_progress)
    except NotFoundError as error:
        raise add_package_suggestions(error, references, sources, target.store) from error
    return _record_wanted(worklist, references, done, target, sources, settings, save=save)


def _describe_unused(installed: Iterable[InstalledPackage], home: Home) -> Iterator[str]:
    """Yield a note for each new version that is not the one used if no version is named."""
    preference, experts = (
        read_preference(home, find_working_folder()),
        Store(home.store).list_experts(),
    )
    for item in installed:
        usage = describe_version_usage(item.expert, experts, preference)
        if item.outcome == "installed" and usage.used_instead is not None:
            yield (
                f"{item.expert.ref} is used only if named; otherwise {usage.used_instead} is, "
                f"`expertctl why {usage.used_instead}` says why"
            )


def _check_options(
    worklist: RequirementList,
    references: Sequence[Reference],
    files: Sequence[Path | str],
    *,
    locked: bool,
    save: bool,
) -> None:
    """Raise `UsageError` for options that contradict each other."""
    if (locked or save) and not worklist.is_project:
        flag = "--locked" if locked else "--save"
        hint = "`expertctl lock` needs an experts.toml, too"
        raise UsageError(f"{flag} needs an experts.toml in this folder", hint=hint)
    if locked and (files or save):
        raise UsageError(
            "--locked installs what is locked: no files, no --save",
            hint="`expertctl lock` updates expert.lock",
        )
    if save and not references:
        raise UsageError("--save needs references", hint="expertctl install acme/sql --save")


def _check_lockable(
    worklist: RequirementList,
    references: Sequence[Reference],
    target: InstallContext,
    sources: RegistrySources,
    settings: Settings,
) -> None:
    """Raise for references with which the project could not be locked, before any is installed."""
    project = worklist.file.read().with_wanted(references)
    resolved = resolve_requirement_list(
        worklist, target, sources, get_release_age(settings), project=project
    )
    check_requirement_list(resolved, target, sources)


def _record_wanted(
    worklist: RequirementList,
    references: Sequence[Reference],
    done: InstallReport,
    target: InstallContext,
    sources: RegistrySources,
    settings: Settings,
    *,
    save: bool,
) -> InstallReport:
    """Write down the references: with ``--save`` in the project, else in the user's own list."""
    wanted = {reference.package: reference for reference in references}
    if not wanted:
        return done
    if save:
        worklist.file.update(wanted)
        resolved = resolve_requirement_list(worklist, target, sources, get_release_age(settings))
        notices = dict.fromkeys([*done.notices, *check_requirement_list(resolved, target, sources)])
        lock_requirement_list(worklist, resolved)
        sources.accept_contents(resolved.chosen, target.accept_changed)
        notes = (*done.notes, *resolved.notes, *_describe_exact_references(references, worklist))
        return replace(done, notes=notes, notices=tuple(notices))
    if worklist.is_project:
        return done
    worklist.file.update(wanted)
    return replace(done, notes=(*done.notes, *_describe_exact_references(references, worklist)))


def _describe_exact_references(
    references: Iterable[Reference], worklist: RequirementList
) -> Iterator[str]:
    """Yield a note for each exact reference: how to follow newer versions instead."""
    save = " --save" if worklist.is_project else ""
    for reference in references:
        exact = reference.digest or reference.constraint.pinned
        if exact is not None:
            follow = replace(reference, constraint=ANY, digest=None)
            yield (
                f"{worklist.file.path} pins {exact}: `expertctl update` keeps it, "
                f"`expertctl install {follow}{save}` follows newer versions"
            )


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `expertctl export`.")],
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
    lock = find_requirement_list(home, Path.cwd()).load_lock()
    context = build_install_context(
        settings,
        unsigned=allow_unsigned,
        mismatch=allow_base_mismatch,
        accept_changed=accept_changed or (),
    )
    size = file.stat().st_size if file.is_file() else None
    with show_progress("importing", size, as_json=as_json) as report:
        locked = lock.contents if lock else {}
        installed = install_set(file, context, locked=locked, progress=report)
    warn(warning for item in installed for warning in item.warnings)
    _print_catalogue_notes(context.catalogue)
    document = {"installed": build_installed_documents(installed, home), "notes": []}
    emit(document, "\n".join(_format_installed(item) for item in installed), as_json=as_json)


def remove(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", autocompletion=complete_experts, help="An expert, or sha256:… of one."
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if other experts require it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove an installed expert. Files that nothing else needs are deleted with it.

    Example: expertctl remove acme/sql@1.0.0
    """
    settings = load_settings()
    catalogue = Catalogue(settings.home.index)
    removed = remove_expert(
        ref,
        store=Store(settings.home.store),
        catalogue=catalogue,
        index=_open_index(settings),
        force=force,
    )
    warn(removed.warnings)
    _print_catalogue_notes(catalogue)
    _drop_from_user_list(removed.ref, settings.home)
    document = {"removed": removed.ref, "freed": removed.freed.size}
    emit(
        document, f"removed {removed.ref}, freed {format_size(removed.freed.size)}", as_json=as_json
    )


def reindex(as_json: JsonFlag = False) -> None:
    """Rebuild the catalogue and the routing vectors. Both are derived from the installed experts.

    Example: expertctl reindex
    """
    settings = load_settings()
    catalogue = Catalogue(settings.home.index)
    done = make_again(Store(settings.home.store), catalogue=catalogue, index=_open_index(settings))
    warn(done.warnings)
    _print_catalogue_notes(catalogue)
    document = {"experts": done.experts, "warnings": list(done.warnings)}
    emit(document, f"indexed {done.experts} experts", as_json=as_json)


def _drop_from_user_list(ref: str, home: Home) -> None:
    """Remove an expert from the user's own list when no version of it is left."""
    package = PackageName.parse(ref.partition("@")[0])
    if not any(expert.package == package for expert in Store(home.store).list_experts()):
        user_requirement_list(home).file.remove(package)


def load_command_settings(*, offline: bool) -> Settings:
    """Return the settings, combined with the ``--offline`` flag of a command."""
    settings = load_settings()
    return replace(settings, offline=settings.offline or offline)


def build_install_context(
    settings: Settings,
    *,
    unsigned: bool = False,
    mismatch: bool = False,
    accept_changed: Iterable[str] = (),
) -> InstallContext:
    """Return where experts are installed to, and which checks the user relaxes."""
    home = settings.home
    return InstallContext(
        Store(home.store),
        BaseStore(home.bases),
        TrustStore(home.trust),
        home.registries,
        catalogue=Catalogue(home.index),
        index=_open_index(settings),
        allow_unsigned=unsigned,
        allow_base_mismatch=mismatch,
        accept_changed=frozenset(map(_parse_exact_version, accept_changed)),
    )


def _parse_exact_version(text: str) -> str:
    """Return ``namespace/name@version`` of a reference that names one version."""
    reference = Reference.parse(text)
    if reference.constraint.pinned is None or reference.registry is not None:
        hint = "for example --accept-changed acme/sql@1.2.0"
        fact = "--accept-changed takes one exact version, without a registry"
        raise UsageError(f"{text}: {fact}", hint=hint)
    return f"{reference.package}@{reference.constraint.pinned}"


def get_release_age(settings: Settings) -> ReleaseAge:
    """Return the minimum age of a version, counted from now."""
    return ReleaseAge.from_now(settings.minimum_release_age, settings.minimum_release_age_exclude)


def make_progress_factory(label: str, *, as_json: bool) -> OpenProgress:
    """Return a function that opens a progress bar for a number of bytes."""
    return lambda total: show_progress(label, total, as_json=as_json)


def split_targets(texts: Sequence[str]) -> tuple[list[Reference], list[Path]]:
    """Separate references from files; a text that is neither is reported as a missing file."""
    references: list[Reference] = []
    files: list[Path] = []
    for text in texts:
        try:
            files += [Path(text)] if is_file_name(text) else []
            references += [] if is_file_name(text) else [Reference.parse(text)]
        except UsageError as error:
            if "@" in text or "/" in text.strip("/"):
                raise
            raise _build_target_error(text) from error
    return references, files


def _build_target_error(text: str) -> NotFoundError:
    """Return the error for a word that is neither a reference nor a file."""
    shown = text if text.isprintable() and len(text) <= 80 else f"{text[:80]!r}"
    hint = "references look like acme/sql, files like sql.expert"
    if text.isprintable() and len(text) <= 80:
        hint = f"`expertctl search {shlex.quote(text)}` finds experts; {hint}"
    return NotFoundError(f"{shown} is not namespace/name, and there is no such file", hint=hint)


def _open_index(settings: Settings) -> RoutingIndex:
    return RoutingIndex(settings.home.root, open_encoder(settings.encoder, home=settings.home))


def print_notices(done: InstallReport) -> None:
    """Print the warnings of an install, and the notices of registries about chosen versions."""
    warnings = [warning for item in done.installed for warning in item.warnings]
    warn(dict.fromkeys([*warnings, *(notice.text for notice in done.notices)]))


def build_findings_document(done: InstallReport, sources: RegistrySources) -> dict[str, object]:
    """Return notes, notices and newly pinned keys of an install, as ``--json`` shows them."""
    return {
        "notes": [*sources.told, *done.notes],
        "notices": [build_notice_document(notice) for notice in done.notices],
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


def build_notice_document(notice: Notice) -> dict[str, object]:
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


def print_notes(done: InstallReport, target: InstallContext) -> None:
    """Print the notes of an install and of the catalogue."""
    for text in (*done.notes, *(target.catalogue.notes if target.catalogue else ())):
        print_message(text)


def build_installed_documents(
    installed: Sequence[InstalledPackage], home: Home
) -> list[dict[str, object]]:
    """Return what was installed as ``--json`` shows it."""
    signers, flagged = read_signers(home.trust), read_flags(home.flagged)
    return [_build_installed_document(item, signers, flagged) for item in installed]


def _print_catalogue_notes(catalogue: Catalogue | None) -> None:
    for text in catalogue.notes if catalogue else ():
        print_message(text)


def _build_installed_document(
    item: InstalledPackage, signers: SignerNames, flagged: FlagsByDigest
) -> dict[str, object]:
    shown = build_expert_document(item.expert, signers, flagged)
    return {**shown, "outcome": item.outcome, "warnings": list(item.warnings)}


def _format_installed(item: InstalledPackage) -> str:
    return f"{item.outcome}: {item.expert.ref}  {item.expert.content_digest}"
