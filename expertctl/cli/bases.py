"""``expertctl base``: the base models that this machine knows."""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.base_experts import plan, profile
from expertctl.cli.output import JsonFlag, emit, human_size, note, progress, table, warn
from expertctl.errors import ExpertError
from expertctl.install.remove import remove_base
from expertctl.settings import load_settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store

app = typer.Typer(
    no_args_is_help=True,
    help="Base models that experts adapt.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.command()
def add(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A Hugging Face directory with safetensors.")
    ],
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    revision: Annotated[str | None, typer.Option(help="The commit it was taken from.")] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Keep a copy; else the directory must stay.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read a base model whole and remember it where it is.

    Example: expertctl base add models/Qwen3-0.6B --name Qwen/Qwen3-0.6B
    """
    bases = _bases()
    add_base = bases.add_copy if copy else bases.add
    with progress("hashing base", _total(directory, copy), as_json=as_json) as report:
        base = add_base(directory, name=name, revision=revision, progress=report)
    identity = base.identity
    text = f"{base.name}  {human_size(base.size)}  {base.path}\n"
    text += f"arch {identity.arch}\nweights {identity.weights}\ntokenizer {identity.tokenizer}"
    if base.foreign:
        note(
            f"only `run --engine transformers` runs {base.name}: slowly, with one expert; "
            "it needs pip install 'expertctl[compat]'"
        )
    emit(_document(base), text, as_json=as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the known bases. Each says whether its files are still what was added.

    Example: expertctl base list --json
    """
    bases = _bases()
    known = bases.bases()
    if not known:
        note("no bases yet; add one with `expertctl base add DIR`")
    states = [_state(bases, base) for base in known]
    documents = [{**_document(b), "state": s} for b, s in zip(known, states, strict=True)]
    rows = [
        [b.name, b.identity.revision or "-", human_size(b.size), _engine(b), s, str(b.path)]
        for b, s in zip(known, states, strict=True)
    ]
    header = ["NAME", "REVISION", "SIZE", "ENGINE", "STATE", "PATH"]
    emit({"bases": documents}, table(header, rows) if rows else "", as_json=as_json)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a base.")],
    force: Annotated[bool, typer.Option("--force", help="Also when experts need it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Forget a base; only a copy of it that is ours is deleted.

    Example: expertctl base remove Qwen/Qwen3-0.6B
    """
    store = Store(load_settings().home.store)
    removed = remove_base(name, bases=_bases(), store=store, force=force)
    warn(removed.warnings)
    emit({"removed": removed.ref}, f"removed {removed.ref}", as_json=as_json)


app.command("plan")(plan)
app.add_typer(profile, name="profile")


def _bases() -> BaseStore:
    return BaseStore(load_settings().home.bases)


def _total(directory: Path, copy: bool) -> int:
    """How many bytes are read: once for the files, once for the tensors, once for a copy."""
    files = directory.iterdir() if directory.is_dir() else []
    return sum(path.stat().st_size for path in files if path.is_file()) * (3 if copy else 2)


def _state(bases: BaseStore, base: StoredBase) -> str:
    try:
        bases.check(base)
    except ExpertError:
        return "changed"
    return "ok"


def _engine(base: StoredBase) -> str:
    """Return the engine that runs a base; what the native one runs, transformers may run too."""
    return "transformers" if base.foreign else "native"


def _document(base: StoredBase) -> dict[str, object]:
    identity = base.identity
    return {
        "name": base.name,
        "revision": identity.revision,
        "path": str(base.path),
        "copied": base.copied,
        "engine": _engine(base),
        "size": base.size,
        "arch": str(identity.arch),
        "weights": str(identity.weights) if identity.weights else None,
        "tokenizer": str(identity.tokenizer),
    }
