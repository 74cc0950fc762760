"""``expertctl trust``: whose signatures count, and for what."""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli import trust_registry
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.errors import UsageError
from expertctl.reference import FROM_FILE
from expertctl.registry.address import RegistryAddress
from expertctl.settings import load_settings
from expertctl.trust.grant import Grant, Revocation, TrustedKey
from expertctl.trust.keys import PublicKey, key_name, read_pem
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

app = CommandGroup("Manage whose signatures are accepted, and for what.")


app.add_typer(trust_registry.app, name="registry")


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the trusted and the revoked keys, and the known registries.

    Example: expertctl trust list
    """
    record = _store().read()
    document = {
        "keys": [_shown(key, record) for key in record.keys],
        "revoked": [_revocation(revocation) for revocation in record.revoked],
        "registries": [trust_registry.document(known) for known in record.registries],
    }
    if not record.keys and not record.revoked:
        note("nobody is trusted yet; `expertctl keys new NAME` or `expertctl trust add FILE`")
    tables = [_text(record), trust_registry.text(record.registries)]
    emit(document, "\n\n".join(filter(None, tables)), as_json=as_json)


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The publisher's public key, PEM.")],
    namespace: Annotated[
        list[str], typer.Option("--namespace", help="What the key may sign; repeatable.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call the key; by default the file's name.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Only for packages from there; else from anywhere."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust a publisher's key for namespaces.

    Example: expertctl trust add acme.pem --namespace acme
    """
    key = PublicKey.from_pem(read_pem(file), what=str(file))
    host = None if registry is None else _host(registry)
    trusted = _store().add(key, name=name or _name_of(file), namespaces=namespace, registry=host)
    covered = _covered(trusted.grants)
    text = f"{trusted.name}  {trusted.key_id}\ntrusted for {covered}"
    emit(_document(trusted), text, as_json=as_json)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME|KEYID", help="A trusted key.")],
    as_json: JsonFlag = False,
) -> None:
    """Trust a key no longer. A revocation of it stays.

    Example: expertctl trust remove acme
    """
    store = _store()
    trusted = store.find(name)
    store.remove(trusted.key_id)
    emit(_document(trusted), f"{trusted.name} is not trusted any more", as_json=as_json)


def _store() -> TrustStore:
    return TrustStore(load_settings().home.trust)


def _host(text: str) -> str:
    host = RegistryAddress.parse(text, allow_http=True).host
    if host == FROM_FILE:
        raise UsageError(f"{FROM_FILE!r} stands for what came from files, not for a registry")
    return host


def _name_of(file: Path) -> str:
    try:
        return key_name(file.name.split(".")[0])
    except UsageError as error:
        raise UsageError(error.message, hint="name the key with `--name NAME`") from error


def _document(trusted: TrustedKey) -> dict[str, object]:
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


def _shown(trusted: TrustedKey, record: TrustRecord) -> dict[str, object]:
    revoked = record.revocation(trusted.key_id) is not None
    return {**_document(trusted), "revoked": revoked}


def _revocation(revocation: Revocation) -> dict[str, object]:
    return {
        "key_id": revocation.key_id,
        "reason": revocation.reason,
        "registry": revocation.registry,
        "namespace": revocation.namespace,
    }


def _text(record: TrustRecord) -> str:
    rows = [[k.name, _covered(k.grants), _state(k.key_id, record), k.key_id] for k in record.keys]
    known = {key.key_id for key in record.keys}
    others = dict.fromkeys(r.key_id for r in record.revoked if r.key_id not in known)
    rows += [["-", "-", _state(key_id, record), key_id] for key_id in others]
    return table(["NAME", "MAY SIGN", "STATE", "KEY ID"], rows) if rows else ""


def _covered(grants: tuple[Grant, ...]) -> str:
    return ", ".join(f"{grant.namespace}/*{_limit(grant)}" for grant in grants)


def _limit(grant: Grant) -> str:
    where = f" of {grant.registry}" if grant.registry else ""
    if grant.content_digests is None:
        return where
    count = len(grant.content_digests)
    return f"{where} ({count} content{'s' if count > 1 else ''})"


def _state(key_id: str, record: TrustRecord) -> str:
    """Return whether a key is revoked, and where if not everywhere."""
    if record.revocation(key_id):
        return "revoked"
    scopes = [r.scope for r in record.revoked if r.key_id == key_id and r.scope]
    where = ", ".join(f"{namespace}/* of {host}" for host, namespace in scopes)
    return f"revoked for {where}" if where else "ok"
