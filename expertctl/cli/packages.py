"""Make and inspect packages, from ``init`` to ``unpack``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.evaluating import MetricOption, measured
from expertctl.cli.named_base import base_or_folder
from expertctl.cli.output import JsonFlag, emit, note, progress, warn
from expertctl.cli.package_view import (
    built_document,
    built_text,
    contents_document,
    inspect_document,
    inspect_text,
)
from expertctl.cli.target import Target, read_target, reading, the_store
from expertctl.durable import write_atomic
from expertctl.errors import ExpertError, UsageError
from expertctl.package import build as building
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.config_cleaning import is_hub_name
from expertctl.package.draft import (
    Overrides,
    base_label,
    base_problems,
    describe_lost_letters,
    encode,
    read_draft,
)
from expertctl.package.evaluation_data import read_data
from expertctl.package.example_prompts import read_examples
from expertctl.package.frame import FAST, LEVELS
from expertctl.package.numbers import doubts
from expertctl.package.read import names_file
from expertctl.package.spool import sign_package
from expertctl.package.spool import unpack as unpack_package
from expertctl.package.verify import verify_contents
from expertctl.package.write import check_place
from expertctl.plain_text import one_line
from expertctl.reference import PackageName, Reference, Version
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.settings import Settings, load_settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.contents import opened
from expertctl.store.store import Store, parse_wanted
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.policy import TrustStore
from expertctl.trust.publisher import Publisher

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The directory that PEFT saved the adapter to.")
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .expert file.")]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NS/NAME", help="The package's name; default local/DIR."),
]
VersionOption = Annotated[
    str | None, typer.Option("--version", metavar="X.Y.Z", help="Its version; default 0.1.0.")
]
Description = Annotated[
    str | None, typer.Option("--description", metavar="TEXT", help="What the expert does.")
]
License = Annotated[
    str | None, typer.Option("--license", metavar="SPDX", help="Its licence, such as Apache-2.0.")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="NAME|DIR",
        help="The base it was trained on: one you added, or a Hugging Face directory; "
        "./NAME is always the directory.",
    ),
]


def init(
    directory: Directory,
    name: Name = None,
    version: VersionOption = None,
    description: Description = None,
    license_: License = None,
    base: Base = None,
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts that are for it, one a line or JSON Lines with a prompt.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a draft of expert.json beside an adapter. It is filled in as far as the files tell.

    Example: expertctl init my-lora --name acme/sql-gen --base Qwen/Qwen3-0.6B
    """
    overrides = _overrides(name, version, description, license_)
    path = directory / MANIFEST_PATH
    if path.exists():
        raise UsageError(f"{path} exists already", hint="edit it, or remove it first")
    prompts = read_examples(examples) if examples is not None else []
    facts = _base_facts(directory, base, as_json=as_json)
    draft = building.draft(directory, overrides, base=facts, examples=prompts)
    _note_name(directory, overrides)
    write_atomic(path, encode(draft))
    missing = base_problems(draft)
    warn(missing)
    document = {"path": str(path), "manifest": draft, "missing": missing}
    emit(document, f"wrote {path}", as_json=as_json)


def build(
    directory: Directory,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: NAME-VERSION.expert here."),
    ] = None,
    sign: Annotated[
        str | None, typer.Option("--sign", metavar="KEY", help="Sign with one of your keys.")
    ] = None,
    name: Name = None,
    version: VersionOption = None,
    description: Description = None,
    license_: License = None,
    base: Base = None,
    level: Annotated[
        int,
        typer.Option(
            "--level",
            min=LEVELS.start,
            max=LEVELS.stop - 1,
            help="zstd level: -1 is quickest to verify, 3 makes smaller files; no digest changes.",
        ),
    ] = FAST,
    evaluate: Annotated[
        Path | None,
        typer.Option("--eval", metavar="DATA", help="Measure it first; expert.json will say it."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="What --eval measures; default DATA's name."),
    ] = None,
    metric: MetricOption = "exact_match",
    as_json: JsonFlag = False,
) -> None:
    """Check an adapter directory and package it. All problems are reported at once.

    Example: expertctl build my-lora/ -o my.expert --sign me
    """
    overrides = _overrides(name, version, description, license_)
    settings = load_settings()
    key = _private_key(settings, sign) if sign else None
    if task is not None and evaluate is None:
        raise UsageError("--task names what --eval measures", hint="add --eval DATA")
    samples = read_data(evaluate, metric=metric) if evaluate is not None else None
    facts = _base_facts(directory, base, as_json=as_json)
    with progress("checking", _size_of(directory), as_json=as_json) as report:
        plan = building.plan_build(directory, overrides, base=facts, progress=report)
    _note_name(directory, overrides)
    target = output or Path(f"{plan.manifest.package.name}-{plan.manifest.version}.expert")
    if samples is not None:
        check_place(target)  # refuse a bad place before measuring
        plan = measured(plan, samples, task=task, output=target, as_json=as_json)
    with progress("packing", 2 * plan.size, as_json=as_json) as report:
        built = building.build(plan, target, key=key, level=level, progress=report)
    _say_built(built)
    doubts_of_router = _routing_doubts(settings, plan)
    for line in doubts_of_router:
        note(line)
    if sign:
        _warn_of_grant(settings, sign, built.manifest.package)
    document = {**built_document(built), "warnings": [*built.warnings, *doubts_of_router]}
    emit(document, built_text(built), as_json=as_json)


def sign(
    file: File,
    key: Annotated[str, typer.Option("--key", metavar="NAME", help="One of your keys.")],
    as_json: JsonFlag = False,
) -> None:
    """Sign a package, or replace its signature. Its content digest stays.

    Example: expertctl sign my.expert --key me
    """
    settings = load_settings()
    private = _private_key(settings, key)
    with reading("signing", file, as_json=as_json) as report:
        contents = sign_package(file, private, progress=report)
    _warn_of_grant(settings, key, contents.manifest.package)
    document = {**contents_document(contents, file), "signer": private.public.key_id}
    emit(document, f"{file}: signed by {key} ({private.public.key_id})", as_json=as_json)


def verify(target: Target, as_json: JsonFlag = False) -> None:
    """Check every digest and the signature of a package. Its key must be trusted for this package.

    Example: expertctl verify my.expert
    """
    trust = TrustStore(load_settings().home.trust)
    contents = read_target(target, label="verifying", as_json=as_json)
    verified = verify_contents(contents, trust, expected=_expected(target))
    text = f"{target}: {contents.manifest.ref} verified, signed by {verified.signer}"
    document = {**contents_document(contents, target), "signer": verified.signer, "verified": True}
    emit(document, text, as_json=as_json)


def inspect(target: Target, as_json: JsonFlag = False) -> None:
    """Show the manifest of a package. Its signature is shown, not verified.

    Example: expertctl inspect my.expert --json
    """
    contents = read_target(target, label="reading", as_json=as_json)
    with opened(target, the_store()) as package:
        warnings = doubts(contents, package.blobs)
    note("not verified: this is what the file says about itself; see `expertctl verify`")
    warn(warnings)
    document = {**inspect_document(contents, target), "warnings": warnings}
    emit(document, inspect_text(contents), as_json=as_json)


def unpack(
    file: File,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    as_json: JsonFlag = False,
) -> None:
    """Write the files of a package to a new directory. Its signature is one of them.

    Example: expertctl unpack my.expert my-lora-copy
    """
    with reading("unpacking", file, as_json=as_json) as report:
        contents = unpack_package(file, directory, progress=report)
    note("not verified: digests are right, the signature was not checked")
    count = len(contents.layout.layers)
    document = {**contents_document(contents, file), "directory": str(directory)}
    emit(document, f"wrote {count} files to {directory}", as_json=as_json)


def _expected(target: str) -> Reference | None:
    wanted = None if names_file(target) else parse_wanted(target)
    return wanted if isinstance(wanted, Reference) else None


def _overrides(
    name: str | None, version: str | None, description: str | None, license_: str | None
) -> Overrides:
    """Return the values of options, parsed; those of files are checked later."""
    return Overrides(
        str(PackageName.parse(name)) if name is not None else None,
        str(Version.parse(version)) if version is not None else None,
        description,
        license_,
    )


def _base_facts(directory: Path, base: str | None, *, as_json: bool) -> BaseFacts | None:
    """Find the base: the one that is named, else the one that the adapter names, if known."""
    label = base_label(directory)
    bases = BaseStore(load_settings().home.bases)
    if base is not None:
        named = base_or_folder(bases, base)
        if isinstance(named, Path):
            return _read_base(named, label, as_json=as_json)
        return _facts_of(named)
    if label is None:
        return None
    found = bases.meant_by(label)
    if found is None:
        if names := ", ".join(known.name for known in bases.bases()):
            note(f"the adapter names the base {label[:200]!r}; known here, for --base: {names}")
        return None
    if found.name != label:
        note(f"the adapter's base {label!r} is taken to be {found.name}")
    return _facts_of(found)


def _facts_of(base: StoredBase) -> BaseFacts:
    return BaseFacts(base.identity, base.shapes, base.foreign, base.path)


def _read_base(directory: Path, label: str | None, *, as_json: bool) -> BaseFacts:
    name = label if label and is_hub_name(label) else None
    with progress("hashing base", _size_of(directory), as_json=as_json) as report:
        return read_base(directory, name=name, progress=report)


def _private_key(settings: Settings, name: str) -> PrivateKey:
    home = settings.home
    return Publisher(KeyRing(home.keys), TrustStore(home.trust)).signing_key(name)


def _note_name(directory: Path, overrides: Overrides) -> None:
    shortened = describe_lost_letters(directory, read_draft(directory), overrides)
    if shortened is not None:
        note(shortened)


def _warn_of_grant(settings: Settings, name: str, package: PackageName) -> None:
    """Warn that a key signs for a namespace that it is not trusted for on this machine."""
    home, namespace = settings.home, package.namespace
    keys = Publisher(KeyRing(home.keys), TrustStore(home.trust)).keys()
    if any(key.name == name and namespace not in key.namespaces for key in keys):
        grant = f"`expertctl keys grant {name} --namespace {namespace}`"
        warn([f"your key {name} is not trusted for {namespace}/* here; {grant} changes that"])


def _routing_doubts(settings: Settings, plan: building.Plan) -> list[str]:
    """Return what keeps the router from choosing an expert, here or where others install it."""
    from expertctl.install.own_packages import own_packages
    from expertctl.routing.advice import advice, without_examples
    from expertctl.routing.encoder import open_encoder
    from expertctl.routing.index import RoutingIndex
    from expertctl.routing.vetting import advise

    manifest, told = plan.manifest, list[str]()
    if not manifest.routing.examples:
        add = f"add some with `expertctl init {shlex.quote(str(plan.directory))} --examples FILE`"
        if (plan.directory / MANIFEST_PATH).exists():
            add = f"add some to {plan.directory / MANIFEST_PATH}"
        named = f"`--expert {manifest.package}`"
        told.append(without_examples(manifest.name, named=named, add=add))
    try:
        home = settings.home
        index = RoutingIndex(home.root, open_encoder(settings.encoder, home=home))
        own = own_packages(Store(home.store).experts(), KeyRing(home.keys))
        return [*told, *advice(manifest, advise(manifest, index, own=own))]
    except ExpertError:  # the index or its encoder cannot be read, as `doctor` says
        return told


def _say_built(built: building.Built) -> None:
    warn(built.warnings)
    for line in built.notes:
        note(line)
    if built.left_out:
        names = one_line(", ".join(built.left_out))
        note(f"left out, because nothing in the package needs them: {names}")
    if built.signer is None:
        note("not signed; sign it with `expertctl sign FILE --key NAME`")


def _size_of(directory: Path) -> int | None:
    if not directory.is_dir():
        return None
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
