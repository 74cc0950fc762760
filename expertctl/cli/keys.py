"""``expertctl keys``: the user's own signing keys."""

from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.errors import UsageError
from expertctl.settings import load_settings
from expertctl.trust.grant import TrustedKey
from expertctl.trust.keys import Algorithm, KeyRing, read_pem, write_new
from expertctl.trust.policy import TrustStore
from expertctl.trust.publisher import OwnKey, Publisher

app = CommandGroup("Manage your own signing keys.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of one of your keys.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NAMESPACE",
        help="Trust the key for this namespace too, beside local; repeatable.",
    ),
]


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the key.")],
    namespace: Namespaces = None,
    algorithm: Annotated[
        Algorithm, typer.Option(help="The public model_signing tool checks ECDSA keys only.")
    ] = "ecdsa-p256",
    as_json: JsonFlag = False,
) -> None:
    """Make a key and trust it for local/* and the namespaces given.

    Example: expertctl keys new me --namespace acme
    """
    publisher = _publisher()
    trusted = publisher.create(name, algorithm=algorithm, namespaces=namespace or [])
    _report(publisher, trusted, as_json=as_json)


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the key.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An unencrypted private key, PEM.")],
    namespace: Namespaces = None,
    as_json: JsonFlag = False,
) -> None:
    """Take in a private key. It is then trusted as one that `keys new` makes.

    Example: expertctl keys import work work-key.pem --namespace acme
    """
    publisher, pem = _publisher(), read_pem(file)
    trusted = publisher.import_(name, pem, namespaces=namespace or [], what=str(file))
    _report(publisher, trusted, as_json=as_json)


@app.command()
def grant(
    name: Name,
    namespace: Annotated[
        list[str],
        typer.Option("--namespace", metavar="NAMESPACE", help="Also for this one; repeatable."),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Trust one of your keys for more namespaces. A registry's owner grants them there.

    Example: expertctl keys grant me --namespace acme
    """
    publisher = _publisher()
    _report(publisher, publisher.grant(name, namespace), as_json=as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List your keys, what each is trusted for, and which are revoked.

    Example: expertctl keys list --json
    """
    keys = _publisher().keys()
    if not keys:
        note("no keys yet; make one with `expertctl keys new NAME`")
    emit({"keys": [_document(key) for key in keys]}, _text(keys), as_json=as_json)


@app.command()
def export(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a new file, not to stdout.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Write the secret key; needs -o FILE.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the public half of a key. Give it to those who shall trust you.

    Example: expertctl keys export me -o me.pub.pem
    """
    key = _publisher().ring.private(name)
    if private and output is None:
        hint = f"expertctl keys export {name} --private -o FILE"
        raise UsageError("a private key is written to a file only, never printed", hint=hint)
    if output is not None:
        pem, mode = (key.pem(), 0o600) if private else (key.public.pem(), 0o644)
        write_new(output, pem, mode=mode)
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


@app.command()
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME|KEYID", help="Your key, a trusted key, or a key id.")
    ],
    reason: Annotated[str, typer.Option(help="Why; shown with every refusal.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key for good: whatever it signed is refused from now on.

    Example: expertctl keys revoke me --reason "laptop stolen"
    """
    revocation = _publisher().revoke(name, reason)
    document = {"key_id": revocation.key_id, "reason": revocation.reason}
    emit(document, f"revoked {revocation.key_id}", as_json=as_json)


def _publisher() -> Publisher:
    home = load_settings().home
    return Publisher(KeyRing(home.keys), TrustStore(home.trust))


def _document(own: OwnKey) -> dict[str, object]:
    return {
        "name": own.name,
        "algorithm": own.key.algorithm,
        "key_id": own.key.key_id,
        "namespaces": list(own.namespaces),
        "revoked": own.revoked,
    }


def _text(keys: list[OwnKey]) -> str:
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
    return table(["NAME", "ALGORITHM", "STATE", "NAMESPACES", "KEY ID"], rows) if rows else ""


def _report(publisher: Publisher, trusted: TrustedKey, *, as_json: bool) -> None:
    path = publisher.ring.path(trusted.name)
    document = {
        "name": trusted.name,
        "algorithm": trusted.key.algorithm,
        "key_id": trusted.key_id,
        "namespaces": list(trusted.namespaces),
        "path": str(path),
    }
    covered = ", ".join(f"{namespace}/*" for namespace in trusted.namespaces)
    text = f"{trusted.name}  {trusted.key_id}\ntrusted for {covered}\nkept in {path}"
    emit(document, text, as_json=as_json)
