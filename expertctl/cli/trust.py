"""``expertctl keys`` and ``trust``: own signing keys, and whose signatures are accepted.

``expertctl trust registry`` manages registries whose index is trusted, and their namespaces.
"""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.completion import complete_own_keys, complete_registries, complete_trusted_keys
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, make_note_once, note, warn
from expertctl.errors import UsageError
from expertctl.reference import FROM_FILE
from expertctl.registry.address import RegistryAddress
from expertctl.settings import Settings, load_settings
from expertctl.trust.grants import Grant, KnownRegistry, Revocation, TrustedKey, parse_namespace
from expertctl.trust.keys import (
    Algorithm,
    KeyRing,
    PublicKey,
    check_key_name,
    read_pem,
    write_new_file,
)
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import OwnKey, PublisherIdentity, TrustStore

registries_app = CommandGroup("Manage trusted registries.")


@registries_app.command("add")
def add_registry(
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


@registries_app.command("list")
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


@registries_app.command("remove")
def remove_registry(
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST", autocompletion=complete_registries, help="A known registry."
        ),
    ],
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


keys_app = CommandGroup("Manage your own signing keys.")

OwnKeyName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The name of one of your keys.", autocompletion=complete_own_keys
    ),
]
NamespacesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NAMESPACE",
        help="Also trust the key for this namespace; repeatable.",
    ),
]


@keys_app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the key.")],
    namespace: NamespacesOption = None,
    algorithm: Annotated[
        Algorithm, typer.Option(help="The public model_signing tool checks ECDSA keys only.")
    ] = "ecdsa-p256",
    as_json: JsonFlag = False,
) -> None:
    """Create a key and trust it for local/* and the namespaces given.

    Example: expertctl keys new me --namespace acme
    """
    publisher = _open_publisher()
    trusted = publisher.create_key(name, algorithm=algorithm, namespaces=namespace or [])
    _print_key(publisher, trusted, as_json=as_json)


@keys_app.command("import")
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the key.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An unencrypted private key, PEM.")],
    namespace: NamespacesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Import a private key. It is then trusted like one of `keys new`.

    Example: expertctl keys import work work-key.pem --namespace acme
    """
    publisher, pem = _open_publisher(), read_pem(file)
    trusted = publisher.import_key(name, pem, namespaces=namespace or [], what=str(file))
    _print_key(publisher, trusted, as_json=as_json)


@keys_app.command()
def grant(
    name: OwnKeyName,
    namespace: Annotated[
        list[str],
        typer.Option(
            "--namespace", metavar="NAMESPACE", help="Also trust it for this namespace; repeatable."
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Trust one of your keys for more namespaces. A registry's owner grants them there.

    Example: expertctl keys grant me --namespace acme
    """
    publisher = _open_publisher()
    _print_key(publisher, publisher.grant_namespaces(name, namespace), as_json=as_json)


@keys_app.command("list")
def list_keys(as_json: JsonFlag = False) -> None:
    """List your keys, what each is trusted for, and which are revoked.

    Example: expertctl keys list --json
    """
    keys = _open_publisher().list_keys()
    if not keys:
        note("no keys yet; make one with `expertctl keys new NAME`")
    emit({"keys": [_build_key_document(key) for key in keys]}, _format_keys(keys), as_json=as_json)


@keys_app.command()
def export(
    name: OwnKeyName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a new file instead of stdout.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Write the secret key; needs -o FILE.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the public half of a key. Share it with people who should trust you.

    Example: expertctl keys export me -o me.pub.pem
    """
    key = _open_publisher().ring.read_private(name)
    if private and output is None:
        hint = f"expertctl keys export {name} --private -o FILE"
        raise UsageError("a private key is written to a file only, never printed", hint=hint)
    if output is not None:
        pem, mode = (key.pem(), 0o600) if private else (key.public.pem(), 0o644)
        write_new_file(output, pem, mode=mode)
    public = key.public.pem().decode("ascii")
    document = {
        "name": name,
        "algorithm": key.public.algorithm,
        "key_id": key.public.key_id,
        "public_key": public,
        "path": str(output) if output else None,
    }
    written = f"wrote the {'private' if private else 'public'} key to {output}"
    emit(document, written if output else public.rstrip("\n"), as_json=as_json)


@keys_app.command()
def revoke(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|KEYID",
            help="Your key, a trusted key, or a key id.",
            autocompletion=complete_trusted_keys,
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why; shown with every refusal.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key for good: whatever it signed is refused from now on.

    Example: expertctl keys revoke me --reason "laptop stolen"
    """
    revocation = _open_publisher().revoke_key(name, reason)
    document = {"key_id": revocation.key_id, "reason": revocation.reason}
    emit(document, f"revoked {revocation.key_id}", as_json=as_json)


def _open_publisher() -> PublisherIdentity:
    home = load_settings().home
    return PublisherIdentity(KeyRing(home.keys), TrustStore(home.trust))


def _build_key_document(own: OwnKey) -> dict[str, object]:
    return {
        "name": own.name,
        "algorithm": own.key.algorithm,
        "key_id": own.key.key_id,
        "namespaces": list(own.namespaces),
        "revoked": own.revoked,
    }


def _format_keys(keys: list[OwnKey]) -> str:
    rows = [
        [
            own.name,
            own.key.algorithm,
            "revoked" if own.revoked else "ok",
            " ".join(own.namespaces) or "-",
            own.key.key_id,
        ]
        for own in keys
    ]
    return (
        format_table(["NAME", "ALGORITHM", "STATE", "NAMESPACES", "KEY ID"], rows) if rows else ""
    )


def _print_key(publisher: PublisherIdentity, trusted: TrustedKey, *, as_json: bool) -> None:
    path = publisher.ring.path(trusted.name)
    document = {
        "name": trusted.name,
        "algorithm": trusted.key.algorithm,
        "key_id": trusted.key_id,
        "namespaces": list(trusted.namespaces),
        "path": str(path),
    }
    covered = ", ".join(f"{namespace}/*" for namespace in trusted.namespaces)
    text = f"{trusted.name}  {trusted.key_id}\ntrusted for {covered}\nstored in {path}"
    emit(document, text, as_json=as_json)


app = CommandGroup("Manage whose signatures are accepted, and for what.")


app.add_typer(registries_app, name="registry")


@app.command("list")
def list_trusted(as_json: JsonFlag = False) -> None:
    """List the trusted and the revoked keys, and the known registries.

    Example: expertctl trust list
    """
    record = _open_trust_store().read()
    document = {
        "keys": [_build_listed_document(key, record) for key in record.keys],
        "revoked": [_build_revocation_document(revocation) for revocation in record.revoked],
        "registries": [build_registry_document(known) for known in record.registries],
    }
    if not record.keys and not record.revoked:
        note("nobody is trusted yet; `expertctl keys new NAME` or `expertctl trust add FILE`")
    tables = [_format_trusted(record), format_registries(record.registries)]
    emit(document, "\n\n".join(filter(None, tables)), as_json=as_json)


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The publisher's public key, PEM.")],
    namespace: Annotated[
        list[str],
        typer.Option("--namespace", help="A namespace that the key may sign; repeatable."),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call the key; by default the file's name.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Only for packages of this registry (default: any)."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust a publisher's key for namespaces.

    Example: expertctl trust add acme.pem --namespace acme
    """
    key = PublicKey.from_pem(read_pem(file), what=str(file))
    host = None if registry is None else _parse_host(registry)
    trusted = _open_trust_store().add(
        key, name=name or _derive_key_name(file), namespaces=namespace, registry=host
    )
    covered = _format_grants(trusted.grants)
    text = f"{trusted.name}  {trusted.key_id}\ntrusted for {covered}"
    emit(_build_trusted_document(trusted), text, as_json=as_json)


@app.command()
def remove(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|KEYID", help="A trusted key.", autocompletion=complete_trusted_keys
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Stop trusting a key. A revocation of it stays.

    Example: expertctl trust remove acme
    """
    store = _open_trust_store()
    trusted = store.find_key(name)
    store.remove(trusted.key_id)
    emit(_build_trusted_document(trusted), f"{trusted.name} is no longer trusted", as_json=as_json)


def _open_trust_store() -> TrustStore:
    return TrustStore(load_settings().home.trust)


def _parse_host(text: str) -> str:
    host = RegistryAddress.parse(text, allow_http=True).host
    if host == FROM_FILE:
        raise UsageError(f"{FROM_FILE!r} stands for files, not for a registry")
    return host


def _derive_key_name(file: Path) -> str:
    try:
        return check_key_name(file.name.split(".")[0])
    except UsageError as error:
        raise UsageError(error.message, hint="name the key with `--name NAME`") from error


def _build_trusted_document(trusted: TrustedKey) -> dict[str, object]:
    return {
        "name": trusted.name,
        "algorithm": trusted.key.algorithm,
        "key_id": trusted.key_id,
        "grants": [
            {
                "namespace": grant.namespace,
                "content_digests": grant.content_digests,
                "registry": grant.registry,
            }
            for grant in trusted.grants
        ],
    }


def _build_listed_document(trusted: TrustedKey, record: TrustRecord) -> dict[str, object]:
    revoked = record.find_revocation(trusted.key_id) is not None
    return {**_build_trusted_document(trusted), "revoked": revoked}


def _build_revocation_document(revocation: Revocation) -> dict[str, object]:
    return {
        "key_id": revocation.key_id,
        "reason": revocation.reason,
        "registry": revocation.registry,
        "namespace": revocation.namespace,
    }


def _format_trusted(record: TrustRecord) -> str:
    rows = [
        [k.name, _format_grants(k.grants), _format_key_state(k.key_id, record), k.key_id]
        for k in record.keys
    ]
    known = {key.key_id for key in record.keys}
    others = dict.fromkeys(r.key_id for r in record.revoked if r.key_id not in known)
    rows += [["-", "-", _format_key_state(key_id, record), key_id] for key_id in others]
    return format_table(["NAME", "MAY SIGN", "STATE", "KEY ID"], rows) if rows else ""


def _format_grants(grants: tuple[Grant, ...]) -> str:
    return ", ".join(f"{grant.namespace}/*{_format_grant_limit(grant)}" for grant in grants)


def _format_grant_limit(grant: Grant) -> str:
    where = f" of {grant.registry}" if grant.registry else ""
    if grant.content_digests is None:
        return where
    count = len(grant.content_digests)
    return f"{where} ({count} content{'s' if count > 1 else ''})"


def _format_key_state(key_id: str, record: TrustRecord) -> str:
    """Return whether a key is revoked, and where if not everywhere."""
    if record.find_revocation(key_id):
        return "revoked"
    scopes = [r.scope for r in record.revoked if r.key_id == key_id and r.scope]
    where = ", ".join(f"{namespace}/* of {host}" for host, namespace in scopes)
    return f"revoked for {where}" if where else "ok"
