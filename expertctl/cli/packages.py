"""Commands that create and inspect packages, from ``init`` and ``build`` to ``unpack``."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.build_inputs import (
    find_base_facts,
    locate_adapter,
    measure_weights,
    open_adapter_source,
)
from expertctl.cli.completion import complete_bases, complete_own_keys
from expertctl.cli.evaluation import MetricOption, measure_build
from expertctl.cli.help import expand_flags
from expertctl.cli.output import JsonFlag, emit, note, print_message, warn
from expertctl.cli.package_view import (
    PackageTarget,
    build_built_document,
    build_contents_document,
    build_inspect_document,
    format_built,
    format_contents,
    open_store,
    read_target,
    show_reading_progress,
)
from expertctl.cli.progress import show_progress
from expertctl.errors import ExpertError, UsageError, to_single_line
from expertctl.files import write_atomic
from expertctl.package import build as building
from expertctl.package.adapter_weights import find_numeric_anomalies
from expertctl.package.draft import (
    ManifestOverrides,
    describe_lost_letters,
    encode_manifest,
    find_base_problems,
    read_draft,
    read_example_prompts,
)
from expertctl.package.evaluation import read_evaluation_data
from expertctl.package.foreign_adapter import open_adapter
from expertctl.package.frame import FASTEST_LEVEL, LEVELS
from expertctl.package.read import is_file_name, verify_contents
from expertctl.package.write import check_target, sign_package, unpack_package
from expertctl.reference import PackageName, Reference, Version, parse_target
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.settings import Settings, load_settings
from expertctl.store.package_reader import open_package
from expertctl.store.store import Store
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.trust_store import PublisherIdentity, TrustStore

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="The directory that PEFT or mlx-lm saved the adapter to."),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .expert file.")]


@dataclass(frozen=True, slots=True)
class ManifestFlags:
    """Values of the manifest; they replace those of expert.json."""

    name: Annotated[
        str | None, typer.Option(metavar="NS/NAME", help="The package's name; default local/DIR.")
    ] = None
    version: Annotated[
        str | None, typer.Option(metavar="X.Y.Z", help="Its version; default 0.1.0.")
    ] = None
    description: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the expert does.")
    ] = None
    license_: Annotated[
        str | None,
        typer.Option("--license", metavar="SPDX", help="Its licence, such as Apache-2.0."),
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            autocompletion=complete_bases,
            help="The base it was trained on: one you added, or a Hugging Face directory; "
            "./NAME is always the directory.",
        ),
    ] = None

    def parse(self) -> ManifestOverrides:
        """Return the parsed values; those of files are checked later."""
        return ManifestOverrides(
            str(PackageName.parse(self.name)) if self.name is not None else None,
            str(Version.parse(self.version)) if self.version is not None else None,
            self.description,
            self.license_,
        )


@expand_flags
def init(
    directory: Directory,
    *,
    manifest: ManifestFlags,
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Example prompts for it, one a line or JSON Lines with a prompt."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a draft of expert.json beside an adapter. Fields that the files reveal are filled in.

    Example: expertctl init my-lora --name acme/sql-gen --base Qwen/Qwen3-0.6B
    """
    overrides = manifest.parse()
    path = directory / MANIFEST_PATH
    if path.exists():
        raise UsageError(f"{path} exists already", hint="edit it, or remove it first")
    prompts = read_example_prompts(examples) if examples is not None else []
    with open_adapter(directory) as (converted, notes):
        facts = find_base_facts(directory, manifest.base, converted, as_json=as_json)
        draft = building.draft_manifest(
            directory, overrides, base=facts, examples=prompts, converted=converted
        )
    for line in notes:
        note(line)
    _note_shortened_name(directory, overrides)
    write_atomic(path, encode_manifest(draft))
    missing = find_base_problems(draft)
    warn(missing)
    document = {"path": str(path), "manifest": draft, "missing": missing}
    emit(document, f"wrote {path}", as_json=as_json)


@expand_flags
def build(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE|ORG/NAME",
            help="The directory that PEFT or mlx-lm saved the adapter to, a LoRA in a GGUF file, "
            "or an adapter of a hub.",
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: NAME-VERSION.expert here."),
    ] = None,
    sign: Annotated[
        str | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            autocompletion=complete_own_keys,
            help="Sign with one of your keys.",
        ),
    ] = None,
    manifest: ManifestFlags,
    level: Annotated[
        int,
        typer.Option(
            "--level",
            min=LEVELS.start,
            max=LEVELS.stop - 1,
            help="zstd level: -1 is quickest to verify, 3 makes smaller files; no digest changes.",
        ),
    ] = FASTEST_LEVEL,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--eval", metavar="DATA", help="Measure it first, and record the result in expert.json."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="NAME", help="The name of the evaluated task; default DATA's name."
        ),
    ] = None,
    metric: MetricOption = "exact_match",
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle-in-sandbox",
            help="Read the tensors of adapter_model.bin in a restricted process.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check an adapter directory and package it. All problems are reported at once.

    ORG/NAME or ORG/NAME@REVISION downloads an adapter of a hub, if there is no such directory.

    Example: expertctl build my-lora/ -o my.expert --sign me
    """
    overrides = manifest.parse()
    settings = load_settings()
    directory, overrides = locate_adapter(
        adapter, overrides, settings, allows_pickle=allow_pickle, as_json=as_json
    )
    key = load_private_key(settings, sign) if sign else None
    if task is not None and evaluate is None:
        raise UsageError("--task names what --eval measures", hint="add --eval DATA")
    samples = read_evaluation_data(evaluate, metric=metric) if evaluate is not None else None
    with open_adapter_source(
        directory, manifest.base, reads_pickle=allow_pickle, as_json=as_json
    ) as source:
        weights = measure_weights(source.converted or source.directory)
        with show_progress("checking", weights, as_json=as_json) as report:
            plan = building.plan_build(
                source.directory,
                overrides,
                base=source.base,
                converted=source.converted,
                progress=report,
            )
        _note_shortened_name(source.directory, overrides)
        target = output or Path(f"{plan.manifest.package.name}-{plan.manifest.version}.expert")
        if samples is not None:
            check_target(target)  # refuse a bad place before measuring
            plan = measure_build(plan, samples, task=task, output=target, as_json=as_json)
        plan = replace(plan, notes=(*source.notes, *plan.notes))
        with show_progress("packing", 2 * plan.size, as_json=as_json) as report:
            built = building.build_package(plan, target, key=key, level=level, progress=report)
    print_build_notes(built)
    doubts_of_router = find_routing_warnings(settings, plan)
    for line in doubts_of_router:
        print_message(line)
    if sign:
        warn_missing_grant(settings, sign, built.manifest.package)
    document = {**build_built_document(built), "warnings": [*built.warnings, *doubts_of_router]}
    emit(document, format_built(built), as_json=as_json)


def sign(
    file: File,
    key: Annotated[
        str,
        typer.Option(
            "--key", metavar="NAME", autocompletion=complete_own_keys, help="One of your keys."
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Sign a package, or replace its signature. Its content digest stays.

    Example: expertctl sign my.expert --key me
    """
    settings = load_settings()
    private = load_private_key(settings, key)
    with show_reading_progress("signing", file, as_json=as_json) as report:
        contents = sign_package(file, private, progress=report)
    warn_missing_grant(settings, key, contents.manifest.package)
    document = {**build_contents_document(contents, file), "signer": private.public.key_id}
    emit(document, f"{file}: signed by {key} ({private.public.key_id})", as_json=as_json)


def verify(target: PackageTarget, as_json: JsonFlag = False) -> None:
    """Check every digest and the signature of a package. Its key must be trusted for this package.

    Example: expertctl verify my.expert
    """
    trust = TrustStore(load_settings().home.trust)
    contents = read_target(target, label="verifying", as_json=as_json)
    verified = verify_contents(contents, trust, expected=_parse_expected(target))
    text = f"{target}: {contents.manifest.ref} verified, signed by {verified.signer}"
    document = {
        **build_contents_document(contents, target),
        "signer": verified.signer,
        "verified": True,
    }
    emit(document, text, as_json=as_json)


def inspect(target: PackageTarget, as_json: JsonFlag = False) -> None:
    """Show the manifest of a package. Its signature is shown, not verified.

    Example: expertctl inspect my.expert --json
    """
    contents = read_target(target, label="reading", as_json=as_json)
    with open_package(target, open_store()) as package:
        warnings = find_numeric_anomalies(contents, package.blobs)
    print_message("not verified: this is what the file says about itself; see `expertctl verify`")
    warn(warnings)
    document = {**build_inspect_document(contents, target), "warnings": warnings}
    emit(document, format_contents(contents), as_json=as_json)


def unpack(
    file: File,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    as_json: JsonFlag = False,
) -> None:
    """Write the files of a package to a new directory. Its signature is one of them.

    Example: expertctl unpack my.expert my-lora-copy
    """
    with show_reading_progress("unpacking", file, as_json=as_json) as report:
        contents = unpack_package(file, directory, progress=report)
    print_message("not verified: digests are correct, the signature was not checked")
    count = len(contents.layout.layers)
    document = {**build_contents_document(contents, file), "directory": str(directory)}
    emit(document, f"wrote {count} files to {directory}", as_json=as_json)


def _parse_expected(target: str) -> Reference | None:
    wanted = None if is_file_name(target) else parse_target(target)
    return wanted if isinstance(wanted, Reference) else None


def load_private_key(settings: Settings, name: str) -> PrivateKey:
    """Return one of the user's keys by name; raises as `PublisherIdentity.read_signing_key`."""
    home = settings.home
    return PublisherIdentity(KeyRing(home.keys), TrustStore(home.trust)).read_signing_key(name)


def _note_shortened_name(directory: Path, overrides: ManifestOverrides) -> None:
    shortened = describe_lost_letters(directory, read_draft(directory), overrides)
    if shortened is not None:
        note(shortened)


def warn_missing_grant(settings: Settings, name: str, package: PackageName) -> None:
    """Warn that a key signs for a namespace that it is not trusted for on this machine."""
    home, namespace = settings.home, package.namespace
    keys = PublisherIdentity(KeyRing(home.keys), TrustStore(home.trust)).list_keys()
    if any(key.name == name and namespace not in key.namespaces for key in keys):
        grant = f"`expertctl keys grant {name} --namespace {namespace}`"
        warn([f"your key {name} is not trusted for {namespace}/* here; {grant} changes that"])


def find_routing_warnings(settings: Settings, plan: building.BuildPlan) -> list[str]:
    """Return reasons why the router may not choose an expert, here or where others install it."""
    from expertctl.install.publication import find_own_packages
    from expertctl.routing.encoder import open_encoder
    from expertctl.routing.index import RoutingIndex
    from expertctl.routing.manifest_lint import advise_publisher, describe_missing_examples
    from expertctl.routing.vetting import preview_flags

    manifest, found = plan.manifest, list[str]()
    if not manifest.routing.examples:
        add = f"add some with `expertctl init {shlex.quote(str(plan.directory))} --examples FILE`"
        if not plan.directory.is_dir():  # made from a GGUF file
            add = "unpack the package, and add some to its expert.json"
        if (plan.directory / MANIFEST_PATH).exists():
            add = f"add some to {plan.directory / MANIFEST_PATH}"
        named = f"`--expert {manifest.package}`"
        found.append(describe_missing_examples(manifest.name, name_option=named, add=add))
    try:
        home = settings.home
        index = RoutingIndex(home.root, open_encoder(settings.encoder, home=home))
        installed = Store(home.store).list_experts()
        own = find_own_packages(installed, KeyRing(home.keys))
        among = {expert.content_digest for expert in installed}
        flags = preview_flags(manifest, index, own=own, among=among)
        return [*found, *advise_publisher(manifest, flags)]
    except ExpertError:  # the index or its encoder cannot be read, as `doctor` says
        return found


def print_build_notes(built: building.BuildResult) -> None:
    """Print the warnings and notes about a package that was written."""
    warn(built.warnings)
    for line in built.notes:
        note(line)
    if built.left_out:
        names = to_single_line(", ".join(built.left_out))
        note(f"left out, because nothing in the package needs them: {names}")
    if built.signer is None:
        note(f"not signed; `expertctl sign {shlex.quote(str(built.path))} --key NAME` signs it")
