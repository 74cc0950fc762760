"""``expertctl base`` and ``pull``: register, list and remove base models."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.base_profile import open_base_store, plan, profile_app, read_routed_config
from expertctl.cli.completion import complete_bases, complete_models
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, note, warn
from expertctl.cli.progress import show_loading, show_progress
from expertctl.errors import ExpertError, NotFoundError, UsageError, format_install_command
from expertctl.install.installed_experts import remove_base
from expertctl.settings import format_size, load_settings
from expertctl.store.base_record import NO_DIGESTS, StoredBase
from expertctl.store.bases import BaseStore, count_bytes_to_read
from expertctl.store.store import Store

if TYPE_CHECKING:
    from expertctl.install.hub_files import HubName
    from expertctl.package.architectures import ExpertsConfig
    from expertctl.package.base_model import BaseIdentity

app = CommandGroup("Manage the base models that experts adapt.")


Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="The name to register it with; default: its own name."
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", help="The commit it was taken from; of a model of a hub: what to download."
    ),
]
WeightFiles = Annotated[
    str | None,
    typer.Option(
        "--file", metavar="PATTERN", help="Weight files of a hub to use, such as '*Q4_K_M.gguf'."
    ),
]
Copy = Annotated[
    bool, typer.Option("--copy", help="Store a copy; otherwise the directory must stay.")
]
CompileKernels = Annotated[
    bool,
    typer.Option("--compile", help="Compile its kernels now, so that run and serve need not wait."),
]


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE|MODEL",
            help="A Hugging Face directory with safetensors, a GGUF file, or a model of a hub to "
            "download: ORG/NAME, ORG/NAME@REVISION, or a short name.",
        ),
    ],
    name: Name = None,
    revision: Revision = None,
    file: WeightFiles = None,
    copy: Copy = False,
    compile_kernels: CompileKernels = False,
    as_json: JsonFlag = False,
) -> None:
    """Register a base model: a local one in place, or one of a hub after its download.

    Example: expertctl base add models/Qwen3-0.6B --name Qwen/Qwen3-0.6B
    """
    from expertctl.cli.hub import find_hub_name

    wanted = find_hub_name(source, revision)
    options = {"copy": copy, "compile_kernels": compile_kernels, "as_json": as_json}
    _add_source(source, wanted, name=name, revision=revision, file=file, **options)


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model of a hub: ORG/NAME, ORG/NAME@REVISION, or a short name of "
            "`expertctl base search`.",
            autocompletion=complete_models,
        ),
    ],
    name: Name = None,
    revision: Revision = None,
    file: WeightFiles = None,
    copy: Copy = False,
    compile_kernels: CompileKernels = False,
    as_json: JsonFlag = False,
) -> None:
    """Download a base model from a hub and register it; the same as `base add MODEL`.

    Example: expertctl pull Qwen/Qwen3-0.6B
    """
    from expertctl.cli.hub import find_name_to_pull

    wanted = find_name_to_pull(model, revision)
    options = {"copy": copy, "compile_kernels": compile_kernels, "as_json": as_json}
    _add_source(model, wanted, name=name, revision=revision, file=file, **options)


def _add_source(
    source: str,
    wanted: "HubName | None",
    *,
    name: str | None,
    revision: str | None,
    file: str | None,
    copy: bool,
    compile_kernels: bool,
    as_json: bool,
) -> None:
    """Register what a command names: a model of a hub, or a path."""
    from expertctl.cli.hub import fetch_model

    bases, directory, model = open_base_store(), Path(source), None
    if wanted is not None:
        model = fetch_model(
            source,
            wanted,
            load_settings(),
            bases,
            pattern=file,
            called=name,
            copies=copy,
            as_json=as_json,
        )
        directory, revision, name = model.path, model.commit, name or wanted.repository
    elif file is not None:
        raise UsageError(
            f"--file chooses among the files of a hub, and {source[:200]} is a path",
            hint="leave out --file, or name a model of a hub: hf:ORG/NAME",
        )
    elif not os.path.lexists(source):  # too long a name, too
        hint = "to download a model: `expertctl pull ORG/NAME`"
        raise NotFoundError(f"{source[:200]}: no such directory", hint=hint)
    add_base = bases.add_copy if copy else bases.add
    size = count_bytes_to_read(directory, copies=copy)
    expected = NO_DIGESTS if model is None else model.digests
    with show_progress("hashing base", size, as_json=as_json) as report:
        base = add_base(directory, name=name, revision=revision, expected=expected, progress=report)
    downloaded: dict[str, object] = {} if model is None else {"downloaded": model.downloaded}
    _report_added(base, downloaded, compile_kernels=compile_kernels, as_json=as_json)


def _report_added(
    base: StoredBase, document: dict[str, object], *, compile_kernels: bool, as_json: bool
) -> None:
    """Print what was registered; compile its kernels first if that is wanted."""
    from expertctl.package.base_tensors import list_unread_parts
    from expertctl.routing.base_dtype import PLAIN_STORAGES, choose_dtype, list_storages

    identity = base.identity
    text = f"{base.name}  {format_size(base.size)}  {base.source}\n"
    text += f"arch {identity.arch}\nweights {identity.weights}\n{_format_tokenizers(identity)}"
    routed = read_routed_config(base)
    if routed is not None:
        share = f"{routed.used} of {routed.count}"
        text += f"\nrouted experts {share} for a token; `expertctl base plan {base.name}`"
    storages = () if base.foreign else list_storages(base)
    if not PLAIN_STORAGES.issuperset(storages):
        text += f"\nstored as {', '.join(storages)}; held in {choose_dtype(base, None)} by default"
    if not base.foreign and (unread := list_unread_parts(base.path)):
        note(f"{base.name} reads texts only: its tensors {'*, '.join(unread)}* are not used")
    if base.foreign:
        note(
            f"only `run --engine transformers` runs {base.name}: slowly, with one expert; "
            f"it needs {format_install_command('compat')}"
        )
    document = {**_build_document(base, routed), "storage": list(storages), **document}
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
        note("no bases yet; add one with `expertctl base add DIR`, or `expertctl pull ORG/NAME`")
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


@app.command()
def search(
    text: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="A part of a name; all without it.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """List short names of well-known open models, for `pull`, `base add` and `--base`.

    Example: expertctl base search qwen3
    """
    from expertctl.install.hub_files import search_short_names

    found = search_short_names(text)
    if not found:
        note(f"no short name contains {text!r}; any model is named by `expertctl pull ORG/NAME`")
    header = ["NAME", "MODEL", "PARAMETERS", "SIZE", "LICENCE"]
    rows = [[r.name, r.repository, r.parameters, r.size, r.licence] for r in found]
    keys = [title.casefold() for title in header]
    documents = [dict(zip(keys, row, strict=True)) for row in rows]
    emit({"models": documents}, format_table(header, rows) if rows else "", as_json=as_json)


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
