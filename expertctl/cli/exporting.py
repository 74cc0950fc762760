"""``expertctl export``: experts in a form for elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, emit, note, progress
from expertctl.cli.target import the_store
from expertctl.errors import UsageError
from expertctl.install.export import Exported, Form, SetForm, export_one, export_set
from expertctl.package.read import names_file
from expertctl.store.store import Store, parse_wanted

SET_SUFFIX = ".experts"


def export(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="FILE|REF", help="A .expert file, or installed experts."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Default: NAME-VERSION here."),
    ] = None,
    oci: Annotated[
        bool, typer.Option("--oci", help="As an OCI archive, which registries' tools read.")
    ] = False,
    peft: Annotated[bool, typer.Option("--peft", help="As a directory that PEFT loads.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write experts to a file. Several, and all they require, go into one.

    Example: expertctl export acme/sql acme/english -o mine.experts
    """
    if oci and peft:
        raise UsageError("--oci and --peft are two forms", hint="choose one of them")
    if len(targets) > 1 or (output is not None and output.suffix == SET_SUFFIX):
        _export_set(targets, output, "oci" if oci else "set", peft=peft, as_json=as_json)
    else:
        _export_one(targets[0], output, _form(oci=oci, peft=peft), as_json=as_json)


def _form(*, oci: bool, peft: bool) -> Form:
    if peft:
        return "peft"
    return "oci" if oci else "expert"


def _export_one(target: str, output: Path | None, form: Form, *, as_json: bool) -> None:
    store = the_store()
    path = output or _default(target, form, store)
    with progress("exporting", None, as_json=as_json) as report:
        done = export_one(target, path, form=form, store=store, progress=report)
    document = {"path": str(path), **_document(done), "format": form}
    if form == "peft":
        _warn_of_files(target)
        document["adapters"] = [str(path / place) for place in done.adapters]
    emit(document, f"wrote {path}", as_json=as_json)


def _warn_of_files(target: str) -> None:
    """Say that a file's signature was not checked; the directory holds none to check later."""
    if names_file(target):
        note("not verified: digests are right, the signature was not checked")


def _export_set(
    targets: Sequence[str], output: Path | None, form: SetForm, *, peft: bool, as_json: bool
) -> None:
    if peft:
        raise UsageError("a directory for PEFT holds one expert", hint="export them one by one")
    if output is None:
        hint = f"-o FILE{SET_SUFFIX} takes all of them and what they require"
        raise UsageError("several experts go into one file, which needs a name", hint=hint)
    if output.suffix == ".expert":
        hint = f"name it {output.stem}{SET_SUFFIX}"
        raise UsageError(f"{output}: a .expert file holds one expert", hint=hint)
    with progress("exporting", None, as_json=as_json) as report:
        done = export_set(targets, output, form=form, store=the_store(), progress=report)
    document = {
        "path": str(output),
        "packages": [_document(package) for package in done],
        "format": form,
    }
    lines = [f"wrote {output}", *(f"  {package.ref}" for package in done)]
    emit(document, "\n".join(lines), as_json=as_json)


def _document(done: Exported) -> dict[str, object]:
    return {"ref": done.ref, "package_digest": str(done.package_digest)}


def _default(target: str, form: Form, store: Store) -> Path:
    """Name the output after the file, or after the expert."""
    suffix = {"expert": ".expert", "oci": ".tar", "peft": ""}[form]
    if not names_file(target):
        expert = store.find(parse_wanted(target))
        return Path(f"{expert.package.name}-{expert.version}{suffix}")
    if form == "expert" and Path(target).is_file():
        hint = "--oci or --peft writes it in another form, -o FILE writes it anew"
        raise UsageError(f"{target} is a file already", hint=hint)
    return Path(target).parent / f"{Path(target).stem}{suffix}"
