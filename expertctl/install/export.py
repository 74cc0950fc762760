"""Taking experts elsewhere: as a file, as an archive for other tools, for PEFT, or several at once.

A set holds what was named and all that it requires, so that `install_set` finds everything in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest, Progress, no_progress
from expertctl.errors import UsageError
from expertctl.install.requirements import with_requirements
from expertctl.package.layout import Layout
from expertctl.package.peft_export import export_peft
from expertctl.package.read import names_file
from expertctl.package.set_layout import index_name, set_layout_of
from expertctl.package.write import export_archive, write_package
from expertctl.store.contents import opened, opened_all
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store, parse_wanted

Form = Literal["expert", "oci", "peft"]
SetForm = Literal["set", "oci"]


@dataclass(frozen=True, slots=True)
class Exported:
    """One package that was written out."""

    ref: str
    package_digest: Digest
    adapters: tuple[str, ...] = ()
    """The places of its adapters in a directory for PEFT, in order."""


def export_one(
    target: str, output: Path, *, form: Form, store: Store, progress: Progress = no_progress
) -> Exported:
    """Write one package, from a file or from the store.

    Raises:
        NotFoundError: when there is no such file or expert.
        UsageError: when the output cannot be written there.
        InvalidPackageError: when the file is malformed.
        DigestError: when bytes are not those of their digest.
    """
    adapters: list[str] = []
    with opened(target, store, beside=output, progress=progress) as package:
        layout, blobs = package.layout, package.blobs
        match form:
            case "expert":
                write_package(output, layout, blobs, progress=progress)
            case "oci":
                export_archive(output, layout, blobs, progress=progress)
            case "peft":
                adapters = export_peft(output, layout, blobs, progress=progress)
    return Exported(package.ref, layout.package_digest, tuple(adapters))


def export_set(
    targets: Sequence[str],
    output: Path,
    *,
    form: SetForm,
    store: Store,
    progress: Progress = no_progress,
) -> list[Exported]:
    """Write installed experts, and all that they require, into one file; return them by name.

    Raises:
        NotFoundError: when one is not installed, or something that it requires.
        UsageError: when one is a file, or the output is a directory.
        InvalidPackageError: when they cannot be in one set.
        DigestError: when a file was changed in the store.
    """
    for target in targets:
        if names_file(target):
            hint = f"`expertctl install {target}` first, then name the expert"
            raise UsageError(f"{target} is a file; a set is made of installed experts", hint=hint)
    wanted = [store.find(parse_wanted(target)) for target in targets]
    experts = with_requirements(wanted, store.experts())
    with opened_all(store, experts) as (layouts, blobs):
        layout = set_layout_of(_named(experts, layouts))
        write = write_package if form == "set" else export_archive
        write(output, layout, blobs, progress=progress)
    ordered = sorted(experts, key=lambda expert: (expert.package, expert.version))
    return [Exported(expert.ref, expert.package_digest) for expert in ordered]


def _named(experts: Sequence[StoredExpert], layouts: Sequence[Layout]) -> dict[str, Layout]:
    named: dict[str, Layout] = {}
    for expert, layout in zip(experts, layouts, strict=True):
        name = index_name(expert.package, expert.version)
        if name in named:
            raise UsageError(f"{expert.ref} is installed from two registries", hint="export one")
        named[name] = layout
    return named
