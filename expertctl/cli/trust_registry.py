"""``expertctl trust registry``: registries whose index is trusted, and their namespaces."""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, make_note_once, note, warn
from expertctl.errors import UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.settings import Settings, load_settings
from expertctl.trust.grants import KnownRegistry, parse_namespace
from expertctl.trust.keys import PublicKey, read_pem
from expertctl.trust.trust_store import TrustStore

app = CommandGroup("Manage trusted registries.")


@app.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="The registry: a host or a URL.")],
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="sha256:…", help="Fingerprint of its index key, from its operator."),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its index key, PEM; no network access.")
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", help="A namespace that belongs to this registry; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust the index that a registry signs with this key.

    It applies to that registry's own packages. Get the fingerprint from the registry's operator,
    never from the registry itself.

    Example: expertctl trust registry add registry.example.com --fingerprint sha256:…
    """
    from expertctl.registry.registry_trust import plan_acceptance

    settings = load_settings()
    address = RegistryAddress.parse(url, allow_http=settings.allow_http)
    key = _obtain_index_key(settings, address, fingerprint, root)
    names = tuple(sorted({parse_namespace(name) for name in namespace or []}))
    trust = TrustStore(settings.home.trust)
    accepted = plan_acceptance(KnownRegistry(address.host, address.url, key, names), trust.read())
    known = trust.add_registry(accepted.known)
    if accepted.replaced is not None:
        warn([f"{known.host} had another index key before: {accepted.replaced}"])
    warn(f"{name} belonged to {host} before" for name, host in accepted.moved)
    emit(build_registry_document(known), _format_added(known), as_json=as_json)


@app.command("list")
def list_registries(as_json: JsonFlag = False) -> None:
    """List the trusted registries.

    Example: expertctl trust registry list
    """
    registries = TrustStore(load_settings().home.trust).read().registries
    if not registries:
        note("no registry is trusted; `expertctl trust registry add URL --fingerprint sha256:…`")
    emit(
        {"registries": [build_registry_document(r) for r in registries]},
        format_registries(registries),
        as_json=as_json,
    )


@app.command()
def remove(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A known registry.")],
    as_json: JsonFlag = False,
) -> None:
    """Stop trusting a registry and the keys pinned from it. What it revoked stays revoked.

    Example: expertctl trust registry remove registry.example.com
    """
    trust = TrustStore(load_settings().home.trust)
    name = RegistryAddress.parse(host, allow_http=True).host
    known = trust.read().find_registry(name)
    trust.remove_registry(name)
    assert known is not None
    emit(build_registry_document(known), f"{known.host} is no longer trusted", as_json=as_json)


def build_registry_document(known: KnownRegistry) -> dict[str, object]:
    """Return a registry as ``--json`` shows it."""
    return {
        "host": known.host,
        "url": known.url,
        "index_key": known.index_key.key_id,
        "namespaces": list(known.namespaces),
        "pinned": list(known.pinned),
    }


def format_registries(registries: tuple[KnownRegistry, ...]) -> str:
    """Return registries as a table, empty when there are none."""
    rows = [
        [r.host, " ".join(r.namespaces) or "-", " ".join(r.pinned) or "-", r.index_key.key_id]
        for r in registries
    ]
    return format_table(["REGISTRY", "NAMESPACES", "PINNED", "INDEX KEY"], rows) if rows else ""


def _obtain_index_key(
    settings: Settings, address: RegistryAddress, fingerprint: str | None, root: Path | None
) -> PublicKey:
    """Return the key that the user vouches for, by its fingerprint, its file or both."""
    from expertctl.registry.http import open_http
    from expertctl.registry.registry_trust import fetch_index_key, parse_fingerprint

    if root is not None:
        key = PublicKey.from_pem(read_pem(root), what=str(root))
        if fingerprint is not None and parse_fingerprint(fingerprint) != key.key_id:
            raise UsageError(f"{root} holds {key.key_id}, not {fingerprint}")
        return key
    if fingerprint is None:
        hint = "add `--fingerprint sha256:…` or `--root FILE`; the registry's operator has it"
        raise UsageError(f"{address.host} cannot vouch for its own key", hint=hint)
    wanted = parse_fingerprint(fingerprint)
    with open_http(settings, notify=make_note_once()) as http:
        return fetch_index_key(http, address, fingerprint=wanted)


def _format_added(known: KnownRegistry) -> str:
    lines = [f"{known.host}  {known.index_key.key_id}"]
    if known.namespaces:
        lines.append(f"for {', '.join(f'{name}/*' for name in known.namespaces)}")
    return "\n".join(lines)
