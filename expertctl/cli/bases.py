"""``expertctl base``: register, list and remove base models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.base_profile import open_base_store, plan, profile_app, read_routed_config
from expertctl.cli.completion import complete_bases
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, note, warn
from expertctl.cli.progress import show_loading, show_progress
from expertctl.errors import ExpertError, format_install_command
from expertctl.install.installed_experts import remove_base
from expertctl.settings import format_size, load_settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore, count_bytes_to_read
from expertctl.store.store import Store

if TYPE_CHECKING:
    from expertctl.package.architectures import ExpertsConfig
    from expertctl.package.base_model import BaseIdentity

app = CommandGroup("Manage the base models that experts adapt.")


@app.command()
def add(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A Hugging Face directory, or a GGUF file.")
    ],
    name: Annotated[str | None, typer.Option(help="The name to register it with.")] = None,
    revision: Annotated[str | None, typer.Option(help="The commit it was taken from.")] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Store a copy; otherwise the directory must stay.")
    ] = False,
    compile_kernels: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile its kernels now, so that run and serve need not wait."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Register a local base model; its files stay in place.

    Example: expertctl base add models/Qwen3-0.6B --name Qwen/Qwen3-0.6B
    """
    bases = open_base_store()
    add_base = bases.add_copy if copy else bases.add
    size = count_bytes_to_read(directory, copies=copy)
    with show_progress("hashing base", size, as_json=as_json) as report:
        base = add_base(directory, name=name, revision=revision, progress=report)
    identity = base.identity
    text = f"{base.name}  {format_size(base.size)}  {base.source}\n"
    text += f"arch {identity.arch}\nweights {identity.weights}\n{_format_tokenizers(identity)}"
    routed = read_routed_config(base)
    if routed is not None:
        share = f"{routed.used} of {routed.count}"
        text += f"\nrouted experts {share} for a token; `expertctl base plan {base.name}`"
    if base.foreign:
        note(
            f"only `run --engine transformers` runs {base.name}: slowly, with one expert; "
            f"it needs {format_install_command('compat')}"
        )
    document = _build_document(base, routed)
    if compile_kernels:
        document["compiled"] = _compile_kernels(base, as_json=as_json)
    emit(document, text, as_json=as_json)


def _compile_kernels(base: StoredBase, *, as_json: bool) -> bool:
    """Compile the kernels of a base; return whether kernels run it."""
    from expertctl.cli.engine import guard_engine_import
    from expertctl.cli.run_options import EngineFlags
    from expertctl.routing.planner import Planner

    settings = load_settings()
    config = EngineFlags("cpu").resolve(settings)
    if base.foreign:
        return False
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.offline import compile_ahead
    with show_loading("compiling", as_json=as_json) as report:
        planner = Planner.open(settings, notify=note)
        found = compile_ahead(
            planner, base, config, kernel_progress=report.report_kernels, notify=note
        )
    note(
        "the kernels of `run` and `serve` are compiled, for the base and the experts installed now"
        if found
        else f"{base.name} runs without compiled kernels"
    )
    return found


@app.command("list")
def list_bases(as_json: JsonFlag = False) -> None:
    """List the registered bases, and whether their files have changed.

    Example: expertctl base list --json
    """
    bases = open_base_store()
    known = bases.list_bases()
    if not known:
        note("no bases yet; add one with `expertctl base add DIR`")
    documents, rows = [], []
    for base in known:
        state, routed = _check_state(bases, base), read_routed_config(base)
        documents.append({**_build_document(base, routed), "state": state})
        revision, size = base.identity.revision or "-", format_size(base.size)
        share = "-" if routed is None else f"{routed.used} of {routed.count}"
        rows.append(
            [base.name, revision, size, share, _get_engine_name(base), state, str(base.source)]
        )
    header = ["NAME", "REVISION", "SIZE", "ROUTED EXPERTS", "ENGINE", "STATE", "PATH"]
    emit({"bases": documents}, format_table(header, rows) if rows else "", as_json=as_json)


@app.command()
def remove(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The name of a base.", autocompletion=complete_bases),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if experts need it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Unregister a base; only copies made by expertctl are deleted.

    Example: expertctl base remove Qwen/Qwen3-0.6B
    """
    store = Store(load_settings().home.store)
    removed = remove_base(name, bases=open_base_store(), store=store, force=force)
    warn(removed.warnings)
    emit({"removed": removed.ref}, f"removed {removed.ref}", as_json=as_json)


app.command("plan")(plan)
app.add_typer(profile_app, name="profile")


def _check_state(bases: BaseStore, base: StoredBase) -> str:
    try:
        bases.check(base)
    except ExpertError:
        return "changed"
    return "ok"


def _get_engine_name(base: StoredBase) -> str:
    """Return the engine that runs a base; transformers may also run a native base."""
    return "transformers" if base.foreign else "native"


def _build_document(base: StoredBase, routed: "ExpertsConfig | None") -> dict[str, object]:
    identity = base.identity
    canonical = identity.canonical_tokenizer
    return {
        "name": base.name,
        "revision": identity.revision,
        "path": str(base.source),
        "copied": base.copied,
        "engine": _get_engine_name(base),
        "size": base.size,
        "routed_experts": None
        if routed is None
        else {"count": routed.count, "used": routed.used, "layers": len(routed.layers)},
        "arch": str(identity.arch),
        "weights": str(identity.weights) if identity.weights else None,
        "tokenizer": str(identity.tokenizer),
        "canonical_tokenizer": str(canonical) if canonical else None,
    }


def _format_tokenizers(identity: "BaseIdentity") -> str:
    canonical = identity.canonical_tokenizer
    text = f"tokenizer {identity.tokenizer}"
    return f"{text}\ncanonical tokenizer {canonical}" if canonical else text
