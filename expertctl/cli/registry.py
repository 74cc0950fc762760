"""``expertctl registry``: run a registry, and administer its users, namespaces and keys.

The server is an optional extra, imported only by the commands that need it.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from expertctl.cli.connection import RegistryOption, connect, format_minute
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, print_message, warn
from expertctl.errors import UsageError, format_install_command, to_single_line
from expertctl.registry import accounts
from expertctl.registry.accounts import NamespaceDetails, ReadAccess, RegistryUser, Role
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import format_size, load_settings, parse_size
from expertctl.trust.keys import KeyRing
from expertctl.trust.trust_store import PublisherIdentity, TrustStore

user_app = CommandGroup("Manage the accounts of a registry.")
namespace_app = CommandGroup("Manage namespaces: owners, publishers, who may read, quotas.")
keys_app = CommandGroup("Manage the keys that may sign in a namespace.")

NamespaceName = Annotated[str, typer.Argument(metavar="NAMESPACE", help="Such as acme.")]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="NAMESPACE", help="The namespace it signs.")
]
ReadOption = Annotated[
    ReadAccess | None,
    typer.Option("--read", help="Who may read: everyone (public), or users (token)."),
]
QuotaOption = Annotated[
    str | None,
    typer.Option("--quota", metavar="SIZE", help="Maximum size, such as 20GB, or default."),
]


@user_app.command("add")
def add_user(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as alice.")],
    admin: Annotated[bool, typer.Option("--admin", help="May do everything.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create an account. Its first token is shown once, on stdout.

    Example: expertctl registry user add alice
    """
    with connect(load_settings(), None, registry) as connection:
        made = accounts.create_user(connection.api, name, admin=admin)
    document = {"registry": connection.host, **_build_user_document(made.user), "token": made.token}
    emit(document, made.token, as_json=as_json)
    print_message(
        f"this is {name}'s token, for `expertctl login {connection.host}`; not shown again"
    )


@user_app.command("list")
def list_users(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List the accounts.

    Example: expertctl registry user list
    """
    with connect(load_settings(), None, registry) as connection:
        found = accounts.list_users(connection.api)
    document = {
        "registry": connection.host,
        "users": [_build_user_document(each) for each in found],
    }
    rows = [
        [
            to_single_line(each.name),
            _format_role(each),
            format_minute(each.created) if each.created else "",
        ]
        for each in found
    ]
    emit(document, format_table(["NAME", "ROLE", "SINCE"], rows), as_json=as_json)


@user_app.command("remove")
def remove_user(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as alice.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Close an account. Its tokens end at once; its name is never reassigned.

    Example: expertctl registry user remove alice
    """
    with connect(load_settings(), None, registry) as connection:
        accounts.remove_user(connection.api, name)
    document = {"registry": connection.host, "removed": name}
    emit(document, f"{name} no longer has an account on {connection.host}", as_json=as_json)


@namespace_app.command("add")
def add_namespace(
    name: NamespaceName,
    owner: Annotated[
        list[str] | None,
        typer.Option(
            "--owner", metavar="USER", help="A user who manages it (default: you); repeatable."
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="expert, or oci for other artifacts.", metavar="expert|oci")
    ] = "expert",
    read: ReadOption = None,
    quota: QuotaOption = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a namespace. Its name is never reassigned.

    Example: expertctl registry namespace add acme --owner alice
    """
    options: JsonObject = {
        "kind": kind,
        **_build_namespace_options(read, quota),
        "owners": [*(owner or ())],
    }
    with connect(load_settings(), None, registry) as connection:
        made = accounts.create_namespace(connection.api, name, options)
    emit(_build_namespace_document(made, connection.host), _format_namespace(made), as_json=as_json)


@namespace_app.command("list")
def list_namespaces(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List the namespaces that you may see.

    Example: expertctl registry namespace list
    """
    with connect(load_settings(), None, registry) as connection:
        found = accounts.list_namespaces(connection.api)
    shown = [_build_namespace_document(each, connection.host) for each in found]
    rows = [[n.name, n.kind, n.read, _format_usage(n), " ".join(n.owners)] for n in found]
    rows = [[to_single_line(cell) for cell in row] for row in rows]
    header = ["NAME", "KIND", "READ", "USED", "OWNERS"]
    text = format_table(header, rows, shorten=("OWNERS",)) if rows else ""
    emit({"registry": connection.host, "namespaces": shown}, text, as_json=as_json)


@namespace_app.command("set")
def set_namespace(
    name: NamespaceName,
    read: ReadOption = None,
    quota: QuotaOption = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Change who may read a namespace, or its quota.

    Example: expertctl registry namespace set acme --read public --quota 20GB
    """
    options = _build_namespace_options(read, quota)
    if not options:
        raise UsageError("there is nothing to change", hint="give --read or --quota")
    with connect(load_settings(), None, registry) as connection:
        changed = accounts.update_namespace(connection.api, name, options)
    emit(
        _build_namespace_document(changed, connection.host),
        _format_namespace(changed),
        as_json=as_json,
    )


@namespace_app.command("member")
def set_member(
    name: NamespaceName,
    who: Annotated[str, typer.Argument(metavar="USER", help="Such as bob.")],
    role: Annotated[
        Role | None, typer.Option("--role", help="publisher may publish; owner may manage, too.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove all rights.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Set or remove the role of a user in a namespace.

    Example: expertctl registry namespace member acme bob --role publisher
    """
    if (role is None) != remove:
        raise UsageError("no role is given", hint="--role publisher, --role owner or --remove")
    with connect(load_settings(), None, registry) as connection:
        if role is None:
            accounts.remove_member(connection.api, name, who)
        else:
            accounts.add_member(connection.api, name, who, role)
    document = {"registry": connection.host, "namespace": name, "user": who, "role": role}
    emit(document, f"{who}: {role or 'no rights'} in {name}/*", as_json=as_json)


@keys_app.command("add")
def add_key(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="One of your keys, or a public key in a file.")
    ],
    namespace: NamespaceOption,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Let a key sign packages of a namespace. One of your older keys there vouches for it.

    Example: expertctl registry keys add me --namespace acme
    """
    ring = KeyRing(load_settings().home.keys)
    public = accounts.read_public_key(ring, key)
    with connect(load_settings(), None, registry) as connection:
        by = accounts.find_vouching_key(
            accounts.fetch_namespace(connection.api, namespace), ring, public
        )
        added = accounts.add_key(connection.api, namespace, public, by=by)
    warn(added.warnings)
    document = {
        "registry": connection.host,
        "namespace": namespace,
        "key_id": public.key_id,
        "vouched_by": added.vouched_by,
        "warnings": list(added.warnings),
    }
    text = f"{public.key_id}\nmay sign {namespace}/* on {connection.host}"
    text += f"\nvouched for by {added.vouched_by}" if added.vouched_by else ""
    emit(document, text, as_json=as_json)


@keys_app.command("list")
def list_keys(
    namespace: NamespaceOption, registry: RegistryOption = None, as_json: JsonFlag = False
) -> None:
    """List the keys of a namespace, revoked ones too.

    Example: expertctl registry keys list --namespace acme
    """
    with connect(load_settings(), None, registry) as connection:
        found = accounts.fetch_namespace(connection.api, namespace).keys
    shown = [{"key_id": k.key_id, "revoked": k.revoked, "reason": k.reason} for k in found]
    document = {"registry": connection.host, "namespace": namespace, "keys": shown}
    rows = [[to_single_line(k.key_id), _format_key_state(k)] for k in found]
    emit(document, format_table(["KEY ID", "STATE"], rows) if rows else "", as_json=as_json)


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY|KEYID", help="One of your keys, or its id.")],
    namespace: NamespaceOption,
    reason: Annotated[str, typer.Option("--reason", help="Why; shown with every refusal.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key for a namespace, for good. What it signed must be signed by another key.

    Example: expertctl registry keys revoke me --namespace acme --reason "laptop stolen"
    """
    home = load_settings().home
    key_id = PublisherIdentity(KeyRing(home.keys), TrustStore(home.trust)).resolve_key_id(key)
    with connect(load_settings(), None, registry) as connection:
        accounts.revoke_key(connection.api, namespace, key_id, reason=reason)
    document = {
        "registry": connection.host,
        "namespace": namespace,
        "key_id": key_id,
        "reason": reason,
    }
    text = f"revoked {key_id} for {namespace}/* on {connection.host}"
    emit(document, text, as_json=as_json)


def _build_namespace_options(read: ReadAccess | None, quota: str | None) -> JsonObject:
    options: JsonObject = {} if read is None else {"read": read}
    if quota is None:
        return options
    return {**options, "quota": None if quota == "default" else parse_size(quota)}


def _build_user_document(found: RegistryUser) -> dict[str, object]:
    return {"name": found.name, "admin": found.admin, "created": found.created}


def _format_role(found: RegistryUser) -> str:
    return "admin" if found.admin else "user"


def _format_key_state(key: accounts.NamespaceKey) -> str:
    return f"revoked: {to_single_line(key.reason)}" if key.revoked else "ok"


def _build_namespace_document(found: NamespaceDetails, host: str) -> dict[str, object]:
    return {
        "registry": host,
        "name": found.name,
        "kind": found.kind,
        "read": found.read,
        "quota": found.quota,
        "used": found.used,
        "owners": list(found.owners),
        "publishers": list(found.publishers),
        "keys": [key.key_id for key in found.keys if not key.revoked],
    }


def _format_namespace(found: NamespaceDetails) -> str:
    publish = ", ".join([*found.owners, *found.publishers]) or "nobody yet"
    readers = "everyone" if found.read == "public" else "every account"
    lines = [
        f"{to_single_line(found.name)}: {to_single_line(found.kind)}, read by {readers}",
        f"used     {_format_usage(found)}",
        f"publish  {to_single_line(publish)}",
    ]
    return "\n".join(lines)


def _format_usage(found: NamespaceDetails) -> str:
    used = format_size(found.used)
    return used if found.quota is None else f"{used} of {format_size(found.quota)}"


app = CommandGroup("Run and administer your own registry.")

app.add_typer(user_app, name="user")
app.add_typer(namespace_app, name="namespace")
app.add_typer(keys_app, name="keys")

DataFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The registry's data folder.")]


@app.command()
def init(
    data: DataFolder,
    name: Annotated[str | None, typer.Option(help="The name that its pages show.")] = None,
    url: Annotated[
        str | None, typer.Option(help="The public address, such as https://experts.acme.io.")
    ] = None,
    read: Annotated[
        Literal["public", "token"], typer.Option(help="Who may read namespaces by default.")
    ] = "token",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8080,
    index_interval_days: Annotated[
        int, typer.Option(help="Index documents are signed again after at most so many days.")
    ] = 7,
    new_admin_token: Annotated[
        bool, typer.Option("--new-admin-token", help="Only create another admin token.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a registry. Its first admin token is shown once, on stdout.

    Example: expertctl registry init /srv/registry --url https://experts.example.org
    """
    with _guard_server_import():
        from registry_server.operation import new_registry
        from registry_server.settings import ServerSettings
    if new_admin_token:
        secret = new_registry.create_admin_token(data.absolute())
        emit({"user": "admin", "token": secret}, secret, as_json=as_json)
        print_message("this is a new admin token, not shown again; the older ones still work")
        return
    settings = ServerSettings(
        data=data.absolute(),
        name=name,
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
    print_message(
        f"this is the admin token, not shown again; `expertctl login {address}` takes it\n"
        f"fingerprint {fingerprint}\n"
        f"users must trust it before they install from here:\n  {trust}\n"
        f"start it with `expertctl registry serve {data}`"
    )


@app.command()
def serve(
    data: DataFolder,
    host: Annotated[str | None, typer.Option(help="Listen on this address.")] = None,
    port: Annotated[int | None, typer.Option(help="Listen on this port; 0 is a free one.")] = None,
    workers: Annotated[int, typer.Option(help="Number of worker processes.")] = 1,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")
    ] = None,
    insecure_http: Annotated[
        bool, typer.Option("--insecure-http", help="Allow tokens over unencrypted HTTP.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a registry until SIGTERM or Ctrl-C. Its address and its log go to stderr.

    Example: expertctl registry serve /srv/registry --port 8080
    """
    with _guard_server_import():
        from expertctl.http.server import ListenAddress
        from registry_server.operation.serve import serve as serve_registry
        from registry_server.settings import override_settings, read_settings
    settings = override_settings(
        read_settings(data), host=host, port=port, certificate=tls_cert, private_key=tls_key
    )

    def report(address: ListenAddress) -> None:
        document = {"url": address.url, "host": address.host, "port": address.port}
        emit(document, "", as_json=as_json)
        sys.stdout.flush()
        print_message(f"listening on {address.url}")

    serve_registry(settings, workers=workers, insecure=insecure_http, report=report)


@app.command()
def backup(
    data: DataFolder,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder of the backup.")],
    as_json: JsonFlag = False,
) -> None:
    """Copy a registry, running or not. A repeated backup copies only what is new.

    The copy holds the index key: keep it as safe as the registry.

    Example: expertctl registry backup /srv/registry /mnt/backup/registry
    """
    with _guard_server_import():
        from registry_server.operation.backup import create_backup
        from registry_server.settings import read_settings
    done = create_backup(read_settings(data), target.absolute())
    text = f"{done.blobs} blobs, {format_size(done.bytes)}"
    text += f"; {done.new} new, {format_size(done.new_bytes)}"
    document = {"target": str(target.absolute()), "blobs": done.blobs, "bytes": done.bytes}
    document |= {"new_blobs": done.new, "new_bytes": done.new_bytes}
    emit(document, text, as_json=as_json)


@app.command()
def restore(
    target: Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of the backup.")],
    data: Annotated[Path, typer.Argument(metavar="DIR", help="A new, or an empty folder.")],
    as_json: JsonFlag = False,
) -> None:
    """Restore a registry from a backup; every digest is checked first.

    Example: expertctl registry restore /mnt/backup/registry /srv/registry
    """
    with _guard_server_import():
        from registry_server.operation.new_registry import restore_backup as restore_registry
    done = restore_registry(target.absolute(), data.absolute())
    document = {"data": str(data.absolute()), "blobs": done.blobs, "bytes": done.bytes}
    emit(document, f"{done.blobs} blobs, {format_size(done.bytes)}", as_json=as_json)


@app.command()
def gc(
    data: DataFolder,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove blobs and uploads that nothing needs any more. The server may be running.

    Example: expertctl registry gc /srv/registry --dry-run
    """
    with _guard_server_import():
        from registry_server.operation.gc import collect_garbage, preview_garbage
        from registry_server.settings import read_settings
    run = preview_garbage if dry_run else collect_garbage
    found = run(read_settings(data), now=time.time())
    text = f"{found.blobs} blobs, {format_size(found.bytes)}; {found.uploads} uploads"
    document = {"blobs": found.blobs, "bytes": found.bytes, "uploads": found.uploads}
    verb = "would be removed" if dry_run else "removed"
    emit({**document, "removed": not dry_run}, f"{verb}: {text}", as_json=as_json)


@contextmanager
def _guard_server_import() -> Iterator[None]:
    """Turn a missing module of the server, an optional extra, into a `UsageError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        message = f"the registry server is not installed: {missing} is missing"
        raise UsageError(message, hint=format_install_command("registry")) from error
