"""``expertctl export``: experts as packages, and in the formats of other programs."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.completion import complete_bases, complete_experts
from expertctl.cli.engine import guard_engine_import
from expertctl.cli.output import JsonFlag, emit, print_message, warn, write_file
from expertctl.cli.package_view import open_store
from expertctl.cli.progress import show_progress
from expertctl.digest import FileDigest
from expertctl.errors import BaseMismatchError, NotFoundError, UsageError
from expertctl.install.installed_experts import (
    ExportedPackage,
    ExportFormat,
    SetFormat,
    export_package,
    export_set,
)
from expertctl.package.compatibility import check_expert_base
from expertctl.package.layout import Blobs
from expertctl.package.read import is_file_name
from expertctl.package.write import copy_verified, open_atomic_directory
from expertctl.reference import parse_target
from expertctl.schema.manifest import MANIFEST_PATH, Decoding, Manifest, parse_manifest
from expertctl.settings import load_settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.package_reader import open_package
from expertctl.store.store import Store

SET_SUFFIX = ".experts"
_SLACK_BYTES = 8
"""`READ_SLACK_BYTES` of the engine, which a package without it cannot import."""


def export(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|REF",
            autocompletion=complete_experts,
            help="A .expert file, or installed experts.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Default: NAME-VERSION here."),
    ] = None,
    oci: Annotated[
        bool, typer.Option("--oci", help="Write an OCI archive, which OCI tools read.")
    ] = False,
    peft: Annotated[
        bool, typer.Option("--peft", help="Write a directory that PEFT loads.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write a LoRA that llama.cpp loads beside its base.")
    ] = False,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="With --gguf, also write a Modelfile for Ollama.")
    ] = False,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write a directory of the base with the expert in it."),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_bases,
            help="The base, for --gguf and --merged; default: the one that it was made for.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write experts to a file. Several experts, and all they require, go into one file.

    Example: expertctl export acme/sql acme/english -o mine.experts
    """
    options = {"--oci": oci, "--peft": peft, "--gguf": gguf, "--merged": merged}
    forms = [name for name, wanted in options.items() if wanted]
    if len(forms) > 1:
        raise UsageError(
            f"{forms[0]} and {forms[1]} contradict each other", hint="choose one of them"
        )
    if modelfile and not gguf:
        raise UsageError("--modelfile describes what --gguf writes", hint="add --gguf")
    if base is not None and not (gguf or merged):
        raise UsageError("--base is for --gguf and --merged", hint="leave it out")
    if gguf or merged:
        if len(targets) > 1:
            raise UsageError(f"{forms[0]} writes one expert", hint="export them one by one")
        _export_computed(
            targets[0], output, base, merged=merged, modelfile=modelfile, as_json=as_json
        )
    elif len(targets) > 1 or (output is not None and output.suffix == SET_SUFFIX):
        _export_set(targets, output, "oci" if oci else "set", peft=peft, as_json=as_json)
    else:
        form: ExportFormat = "peft" if peft else "oci" if oci else "expert"
        _export_one(targets[0], output, form, as_json=as_json)


def _export_one(target: str, output: Path | None, form: ExportFormat, *, as_json: bool) -> None:
    store = open_store()
    path = output or _choose_output(target, form, store)
    with show_progress("exporting", None, as_json=as_json) as report:
        done = export_package(target, path, form=form, store=store, progress=report)
    document = {"path": str(path), **_build_export_document(done), "format": form}
    if form == "peft":
        _note_unverified(target)
        document["adapters"] = [str(path / place) for place in done.adapters]
    emit(document, f"wrote {path}", as_json=as_json)


def _note_unverified(target: str) -> None:
    """Print that a file's signature was not checked; the directory has none to check later."""
    if is_file_name(target):
        print_message("not verified: digests are correct, the signature was not checked")


def _export_set(
    targets: Sequence[str], output: Path | None, form: SetFormat, *, peft: bool, as_json: bool
) -> None:
    if peft:
        raise UsageError("a directory for PEFT holds one expert", hint="export them one by one")
    if output is None:
        hint = f"-o FILE{SET_SUFFIX} takes all of them and what they require"
        raise UsageError("several experts go into one file, which needs a name", hint=hint)
    if output.suffix == ".expert":
        hint = f"name it {output.stem}{SET_SUFFIX}"
        raise UsageError(f"{output}: a .expert file holds one expert", hint=hint)
    with show_progress("exporting", None, as_json=as_json) as report:
        done = export_set(targets, output, form=form, store=open_store(), progress=report)
    document = {
        "path": str(output),
        "packages": [_build_export_document(package) for package in done],
        "format": form,
    }
    lines = [f"wrote {output}", *(f"  {package.ref}" for package in done)]
    emit(document, "\n".join(lines), as_json=as_json)


def _build_export_document(done: ExportedPackage) -> dict[str, object]:
    return {"ref": done.ref, "package_digest": str(done.package_digest)}


def _choose_output(target: str, form: str, store: Store) -> Path:
    """Name the output after the file, or after the expert."""
    suffix = {"expert": ".expert", "oci": ".tar", "gguf": ".gguf"}.get(form, "")
    if not is_file_name(target):
        expert = store.find(parse_target(target))
        return Path(f"{expert.package.name}-{expert.version}{suffix}")
    if form == "expert" and Path(target).is_file():
        hint = "--oci or --peft writes it in another format, -o FILE writes a copy"
        raise UsageError(f"{target} is a file already", hint=hint)
    return Path(target).parent / f"{Path(target).stem}{suffix}"


@dataclass(frozen=True, slots=True)
class _PackageBytes:
    """The files of an open package, each read and checked at once."""

    files: Mapping[str, FileDigest]
    blobs: Blobs

    def read_file(self, path: str) -> memoryview:
        """Return one file, followed by the spare bytes that the engine wants."""
        file, data = self.files[path], BytesIO()
        with self.blobs(file.digest) as stream:
            copy_verified(stream, data, size=file.size, digest=file.digest)
        data.write(bytes(_SLACK_BYTES))
        return data.getbuffer()


def _export_computed(
    target: str,
    output: Path | None,
    base: str | None,
    *,
    merged: bool,
    modelfile: bool,
    as_json: bool,
) -> None:
    """Write what is computed from the numbers of an expert: a LoRA in GGUF, or a merged base."""
    form, store = "merged" if merged else "gguf", open_store()
    path = output or _choose_output(target, form, store)
    if not merged and not path.name:
        raise UsageError(f"{path} is a folder", hint="name a file with -o FILE.gguf")
    recipe = path.with_name("Modelfile") if modelfile else None
    if recipe == path:
        raise UsageError("-o Modelfile is the file of --modelfile", hint="name it NAME.gguf")
    for file in () if merged else (path, recipe):
        if file is not None and (file.exists() or file.is_symlink()):
            raise UsageError(f"{file} exists already", hint="name another place with -o")
    with open_package(target, store, unpack_folder=path) as package:
        files = _PackageBytes({f.path: f for f in package.layout.files}, package.blobs)
        manifest = parse_manifest(bytes(files.read_file(MANIFEST_PATH)[:-_SLACK_BYTES]))
        found = _find_base(manifest, base)
        BaseStore(load_settings().home.bases).check(found)
        if merged:
            _write_merged(path, manifest, files, found, as_json=as_json)
        else:
            _write_gguf(path, manifest, files, found, as_json=as_json)
    if recipe is not None:
        text = _format_modelfile(path, manifest.decoding, found)
        write_file(recipe, text.encode())
    _note_unverified(target)
    document = {
        "path": str(path),
        "ref": manifest.ref,
        "package_digest": str(package.layout.package_digest),
        "format": form,
        "base": found.name,
        "modelfile": None if recipe is None else str(recipe),
    }
    lines = [f"wrote {path}", *([f"wrote {recipe}"] if recipe else [])]
    emit(document, "\n".join(lines), as_json=as_json)


def _find_base(manifest: Manifest, wanted: str | None) -> StoredBase:
    """Return the base that an expert is written for, which must be a known one.

    Raises:
        BaseMismatchError: when the named one is another than that of the expert.
        NotFoundError: when it is not known.
    """
    bases = BaseStore(load_settings().home.bases)
    if wanted is not None:
        named = bases.find(wanted)
        warn(check_expert_base(manifest, named.identity))
        return named
    fitting: list[tuple[list[str], StoredBase]] = []
    for known in bases.list_bases():
        with suppress(BaseMismatchError):
            fitting.append((check_expert_base(manifest, known.identity), known))
    if fitting:
        warnings, found = min(fitting, key=lambda each: len(each[0]))
        warn(warnings)
        return found
    raise NotFoundError(
        f"{manifest.ref} is written for its base, {manifest.base.name}, which is not known here",
        hint="`expertctl base add DIR` with the base's directory; then repeat the command",
    )


def _write_merged(
    path: Path, manifest: Manifest, files: _PackageBytes, base: StoredBase, *, as_json: bool
) -> None:
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.adapters.export import export_merged
        from expertctl.engine.adapters.load import load_adapter
    adapter = load_adapter(manifest, files)
    with (
        open_atomic_directory(path) as folder,
        show_progress("merging", None, as_json=as_json) as report,
    ):
        export_merged(folder, adapter, base.path, progress=report)


def _write_gguf(
    path: Path, manifest: Manifest, files: _PackageBytes, base: StoredBase, *, as_json: bool
) -> None:
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.adapters.export import export_gguf
        from expertctl.engine.adapters.load import load_adapter
    data = BytesIO()
    export_gguf(data, load_adapter(manifest, files), base.path, label=base.name)
    write_file(path, data.getvalue())


_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""Settings of a manifest: our names to those of Ollama."""


def _format_modelfile(adapter: Path, decoding: Decoding, base: StoredBase) -> str:
    """Return a Modelfile; see https://docs.ollama.com/modelfile."""
    lines = [f"FROM {base.source}", f"ADAPTER ./{adapter.name}"]
    for ours, theirs in _PARAMETERS.items():
        value = getattr(decoding, ours)
        if value is not None:
            lines.append(f"PARAMETER {theirs} {value}")
    for text in decoding.stop:
        if text.endswith('"') or '"""' in text:
            warn([f"a Modelfile cannot hold the stop text {text[:40]!r}: it is left out"])
            continue
        lines.append(f"PARAMETER stop {_quote(text)}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Quote a text of a Modelfile, which knows no escapes: with three quotes if it needs them."""
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'
