"""``expertctl registry``: run a registry of one's own.

The server is an extra, imported only by the commands that need it.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from expertctl.cli import registry_people
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, human_size, note
from expertctl.errors import UsageError

app = CommandGroup("Run and administer your own registry.")

app.add_typer(registry_people.user, name="user")
app.add_typer(registry_people.namespace, name="namespace")
app.add_typer(registry_people.keys, name="keys")

DataFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The registry's data folder.")]


@app.command()
def init(
    data: DataFolder,
    url: Annotated[
        str | None,
        typer.Option(help="The address that users see, such as https://experts.acme.io."),
    ] = None,
    read: Annotated[
        Literal["public", "token"],
        typer.Option(help="Who may read namespaces that do not say so themselves."),
    ] = "token",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8080,
    index_interval_days: Annotated[
        int,
        typer.Option(help="How often index documents are signed anew at least, which they state."),
    ] = 7,
    new_admin_token: Annotated[
        bool, typer.Option("--new-admin-token", help="Only make another admin token.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a registry. Its first admin token is shown once, on stdout.

    Example: expertctl registry init /srv/registry --url https://experts.example.org
    """
    with _server_extra():
        from registry_server.operation import new_registry
        from registry_server.settings import ServerSettings
    if new_admin_token:
        secret = new_registry.new_admin_token(data.absolute())
        emit({"user": "admin", "token": secret}, secret, as_json=as_json)
        note("this is a new token of admin; the older ones still work, not shown again")
        return
    settings = ServerSettings(
        data=data.absolute(),
        host=host,
        port=port,
        url=url,
        read=read,
        index_interval_days=index_interval_days,
    )
    made = new_registry.init_registry(settings)
    address, fingerprint = made.settings.public_url, made.fingerprint
    trust = f"expertctl trust registry add {address} --fingerprint {fingerprint}"
    document = {"data": str(settings.data), "url": address, "fingerprint": fingerprint}
    document |= {"user": "admin", "token": made.token, "trust": trust}
    emit(document, made.token, as_json=as_json)
    note(
        f"this is the token of admin, not shown again: `expertctl login {address}` takes it\n"
        f"fingerprint {fingerprint}\n"
        f"whoever installs from here trusts it first:\n  {trust}\n"
        f"start it with `expertctl registry serve {data}`"
    )


@app.command()
def serve(
    data: DataFolder,
    host: Annotated[str | None, typer.Option(help="Listen on this address.")] = None,
    port: Annotated[int | None, typer.Option(help="Listen on this port; 0 is a free one.")] = None,
    workers: Annotated[int, typer.Option(help="How many processes answer.")] = 1,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")
    ] = None,
    insecure_http: Annotated[
        bool, typer.Option("--insecure-http", help="Let tokens cross a network in clear text.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a registry until SIGTERM or Ctrl-C. Says where on stderr; the log goes there too.

    Example: expertctl registry serve /srv/registry --port 8080
    """
    with _server_extra():
        from expertctl.http.listening import Listening
        from registry_server.operation.serve import serve as serve_registry
        from registry_server.settings_file import overridden, read_settings
    settings = overridden(
        read_settings(data), host=host, port=port, certificate=tls_cert, private_key=tls_key
    )

    def report(address: Listening) -> None:
        document = {"url": address.url, "host": address.host, "port": address.port}
        emit(document, "", as_json=as_json)
        sys.stdout.flush()
        note(f"listening on {address.url}")

    serve_registry(settings, workers=workers, insecure=insecure_http, report=report)


@app.command()
def backup(
    data: DataFolder,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder of the backup.")],
    as_json: JsonFlag = False,
) -> None:
    """Copy a registry, running or not. The same target again takes only what is new.

    The copy holds the index key: keep it as safe as the registry.

    Example: expertctl registry backup /srv/registry /mnt/backup/registry
    """
    with _server_extra():
        from registry_server.operation.backup import back_up
        from registry_server.settings_file import read_settings
    done = back_up(read_settings(data), target.absolute())
    text = f"{done.blobs} blobs, {human_size(done.bytes)}"
    text += f"; {done.new} new, {human_size(done.new_bytes)}"
    document = {"target": str(target.absolute()), "blobs": done.blobs, "bytes": done.bytes}
    document |= {"new_blobs": done.new, "new_bytes": done.new_bytes}
    emit(document, text, as_json=as_json)


@app.command()
def restore(
    target: Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of the backup.")],
    data: Annotated[Path, typer.Argument(metavar="DIR", help="A new, or an empty folder.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a registry out of a backup; every digest is checked first.

    Example: expertctl registry restore /mnt/backup/registry /srv/registry
    """
    with _server_extra():
        from registry_server.operation.restore import restore as restore_registry
    done = restore_registry(target.absolute(), data.absolute())
    document = {"data": str(data.absolute()), "blobs": done.blobs, "bytes": done.bytes}
    emit(document, f"{done.blobs} blobs, {human_size(done.bytes)}", as_json=as_json)


@app.command()
def gc(
    data: DataFolder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove blobs and uploads that nothing needs any more. The server may run.

    Example: expertctl registry gc /srv/registry --dry-run
    """
    with _server_extra():
        from registry_server.operation.collection import collect_garbage, survey_garbage
        from registry_server.settings_file import read_settings
    run = survey_garbage if dry_run else collect_garbage
    found = run(read_settings(data), now=time.time())
    text = f"{found.blobs} blobs, {human_size(found.bytes)}; {found.uploads} uploads"
    document = {"blobs": found.blobs, "bytes": found.bytes, "uploads": found.uploads}
    verb = "would be removed" if dry_run else "removed"
    emit({**document, "removed": not dry_run}, f"{verb}: {text}", as_json=as_json)


@contextmanager
def _server_extra() -> Iterator[None]:
    """Guard imports of the server, an extra that few installations have.

    Raises:
        UsageError: when the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        message = f"the registry server is not installed: {missing} is missing"
        raise UsageError(message, hint="pip install 'expertctl[registry]'") from error
