"""``expertctl trust``: whose signatures count, and for what."""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.trust.grant import Grant, TrustedKey
from expertctl.trust.keys import PublicKey, key_name, read_pem
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

app = typer.Typer(
    no_args_is_help=True,
    help="Whose signatures count, and for what.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the trusted keys with their namespaces, and the revoked ones.

    Example: expertctl trust list
    """
    record = _store().read()
    revoked = [{"key_id": r.key_id, "reason": r.reason} for r in record.revoked]
    document = {"keys": [_shown(key, record) for key in record.keys], "revoked": revoked}
    if not record.keys and not record.revoked:
        note("nobody is trusted yet; `expertctl keys new NAME` or `expertctl trust add FILE`")
    emit(document, _text(record), as_json=as_json)


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The publisher's public key, PEM.")],
    namespace: Annotated[
        list[str], typer.Option("--namespace", help="What the key may sign; repeatable.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call the key; by default the file's name.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trust a publisher's key for namespaces.

    Example: expertctl trust add acme.pem --namespace acme
    """
    key = PublicKey.from_pem(read_pem(file), what=str(file))
    trusted = _store().add(key, name=name or _name_of(file), namespaces=namespace)
    covered = ", ".join(f"{namespace}/*" for namespace in trusted.namespaces)
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
            {"namespace": grant.namespace, "content_digests": grant.content_digests}
            for grant in trusted.grants
        ],
    }


def _shown(trusted: TrustedKey, record: TrustRecord) -> dict[str, object]:
    revoked = record.revocation(trusted.key_id) is not None
    return {**_document(trusted), "revoked": revoked}


def _text(record: TrustRecord) -> str:
    rows = [[k.name, _covered(k.grants), _state(k, record), k.key_id] for k in record.keys]
    known = {key.key_id for key in record.keys}
    rows += [["-", "-", "revoked", r.key_id] for r in record.revoked if r.key_id not in known]
    return table(["NAME", "MAY SIGN", "STATE", "KEY ID"], rows) if rows else ""


def _covered(grants: tuple[Grant, ...]) -> str:
    return ", ".join(f"{grant.namespace}/*{_limit(grant)}" for grant in grants)


def _limit(grant: Grant) -> str:
    if grant.content_digests is None:
        return ""
    count = len(grant.content_digests)
    return f" ({count} content{'s' if count > 1 else ''})"


def _state(trusted: TrustedKey, record: TrustRecord) -> str:
    return "revoked" if record.revocation(trusted.key_id) else "ok"
