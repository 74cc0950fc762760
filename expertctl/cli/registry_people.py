"""``expertctl registry user``, ``namespace`` and ``keys``: who may do what, on a registry."""

from typing import Annotated

import typer

from expertctl.cli.connection import RegistryOption, connected
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, human_size, note, table, warn
from expertctl.errors import UsageError
from expertctl.plain_text import one_line
from expertctl.registry import people
from expertctl.registry.people import Namespace, Read, Role, User
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import load_settings, parse_size
from expertctl.trust.keys import KeyRing
from expertctl.trust.policy import TrustStore
from expertctl.trust.publisher import Publisher


def _group(text: str) -> CommandGroup:
    return CommandGroup(text)


user = _group("Who has an account on a registry.")
namespace = _group("Who publishes, who reads, and how much fits.")
keys = _group("The keys whose signatures count in a namespace.")

NamespaceName = Annotated[str, typer.Argument(metavar="NAMESPACE", help="Such as acme.")]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="NAMESPACE", help="The namespace it signs.")
]
ReadOption = Annotated[
    Read | None, typer.Option("--read", help="Who may read: public, or token for users alone.")
]
QuotaOption = Annotated[
    str | None, typer.Option("--quota", metavar="SIZE", help="What fits: 20GB, or default.")
]


@user.command("add")
def add_user(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as alice.")],
    admin: Annotated[bool, typer.Option("--admin", help="May do everything.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an account. Its first token is shown once, on stdout.

    Example: expertctl registry user add alice
    """
    with connected(load_settings(), None, registry) as connection:
        made = people.add_user(connection.api, name, admin=admin)
    document = {"registry": connection.host, **_user_document(made.user), "token": made.token}
    emit(document, made.token, as_json=as_json)
    note(f"this is {name}'s token, for `expertctl login {connection.host}`; not shown again")


@user.command("list")
def list_users(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List the accounts.

    Example: expertctl registry user list
    """
    with connected(load_settings(), None, registry) as connection:
        found = people.users(connection.api)
    document = {"registry": connection.host, "users": [_user_document(each) for each in found]}
    rows = [[one_line(each.name), _rank(each), each.created or ""] for each in found]
    emit(document, table(["NAME", "ROLE", "SINCE"], rows), as_json=as_json)


@user.command("remove")
def remove_user(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as alice.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Close an account. Its tokens end at once; its name is never given to another.

    Example: expertctl registry user remove alice
    """
    with connected(load_settings(), None, registry) as connection:
        people.remove_user(connection.api, name)
    document = {"registry": connection.host, "removed": name}
    emit(document, f"{name} has no account on {connection.host} any more", as_json=as_json)


@namespace.command("add")
def add_namespace(
    name: NamespaceName,
    owner: Annotated[
        list[str] | None,
        typer.Option("--owner", metavar="USER", help="Manages it; default: you; repeatable."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="expert, or oci for anything but experts.", metavar="expert|oci")
    ] = "expert",
    read: ReadOption = None,
    quota: QuotaOption = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a namespace. Its name is never given to others later.

    Example: expertctl registry namespace add acme --owner alice
    """
    options: JsonObject = {"kind": kind, **_options(read, quota), "owners": [*(owner or ())]}
    with connected(load_settings(), None, registry) as connection:
        made = people.add_namespace(connection.api, name, options)
    emit(_namespace_document(made, connection.host), _one_namespace(made), as_json=as_json)


@namespace.command("list")
def list_namespaces(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List the namespaces that you may see.

    Example: expertctl registry namespace list
    """
    with connected(load_settings(), None, registry) as connection:
        found = people.namespaces(connection.api)
    shown = [_namespace_document(each, connection.host) for each in found]
    rows = [[n.name, n.kind, n.read, _room(n), " ".join(n.owners)] for n in found]
    rows = [[one_line(cell) for cell in row] for row in rows]
    text = table(["NAME", "KIND", "READ", "USED", "OWNERS"], rows) if rows else ""
    emit({"registry": connection.host, "namespaces": shown}, text, as_json=as_json)


@namespace.command("set")
def set_namespace(
    name: NamespaceName,
    read: ReadOption = None,
    quota: QuotaOption = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Change who may read a namespace, or how much fits into it.

    Example: expertctl registry namespace set acme --read public --quota 20GB
    """
    options = _options(read, quota)
    if not options:
        raise UsageError("there is nothing to change", hint="give --read or --quota")
    with connected(load_settings(), None, registry) as connection:
        changed = people.set_namespace(connection.api, name, options)
    emit(_namespace_document(changed, connection.host), _one_namespace(changed), as_json=as_json)


@namespace.command("member")
def member(
    name: NamespaceName,
    who: Annotated[str, typer.Argument(metavar="USER", help="Such as bob.")],
    role: Annotated[
        Role | None, typer.Option("--role", help="publisher publishes; owner manages, too.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take all rights away.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Let somebody publish in a namespace, or manage it, or neither.

    Example: expertctl registry namespace member acme bob --role publisher
    """
    if (role is None) != remove:
        raise UsageError("say which rights", hint="--role publisher, --role owner or --remove")
    with connected(load_settings(), None, registry) as connection:
        if role is None:
            people.remove_member(connection.api, name, who)
        else:
            people.add_member(connection.api, name, who, role)
    document = {"registry": connection.host, "namespace": name, "user": who, "role": role}
    emit(document, f"{who}: {role or 'no rights'} in {name}/*", as_json=as_json)


@keys.command("add")
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
    public = people.find_key(ring, key)
    with connected(load_settings(), None, registry) as connection:
        by = people.vouching(people.namespace(connection.api, namespace), ring, public)
        added = people.add_key(connection.api, namespace, public, by=by)
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


@keys.command("list")
def list_keys(
    namespace: NamespaceOption, registry: RegistryOption = None, as_json: JsonFlag = False
) -> None:
    """List the keys of a namespace, revoked ones too.

    Example: expertctl registry keys list --namespace acme
    """
    with connected(load_settings(), None, registry) as connection:
        found = people.namespace(connection.api, namespace).keys
    shown = [{"key_id": k.key_id, "revoked": k.revoked, "reason": k.reason} for k in found]
    document = {"registry": connection.host, "namespace": namespace, "keys": shown}
    rows = [[one_line(k.key_id), _state(k)] for k in found]
    emit(document, table(["KEY ID", "STATE"], rows) if rows else "", as_json=as_json)


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY|KEYID", help="One of your keys, or its id.")],
    namespace: NamespaceOption,
    reason: Annotated[str, typer.Option("--reason", help="Why; shown with every refusal.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key for a namespace, for good. What it signed must be signed by another.

    Example: expertctl registry keys revoke me --namespace acme --reason "laptop stolen"
    """
    home = load_settings().home
    key_id = Publisher(KeyRing(home.keys), TrustStore(home.trust)).key_id_of(key)
    with connected(load_settings(), None, registry) as connection:
        people.revoke_key(connection.api, namespace, key_id, reason=reason)
    document = {
        "registry": connection.host,
        "namespace": namespace,
        "key_id": key_id,
        "reason": reason,
    }
    text = f"revoked {key_id} for {namespace}/* on {connection.host}"
    emit(document, text, as_json=as_json)


def _options(read: Read | None, quota: str | None) -> JsonObject:
    options: JsonObject = {} if read is None else {"read": read}
    if quota is None:
        return options
    return {**options, "quota": None if quota == "default" else parse_size(quota)}


def _user_document(found: User) -> dict[str, object]:
    return {"name": found.name, "admin": found.admin, "created": found.created}


def _rank(found: User) -> str:
    return "admin" if found.admin else "user"


def _state(key: people.NamespaceKey) -> str:
    return f"revoked: {one_line(key.reason)}" if key.revoked else "ok"


def _namespace_document(found: Namespace, host: str) -> dict[str, object]:
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


def _one_namespace(found: Namespace) -> str:
    publish = ", ".join([*found.owners, *found.publishers]) or "nobody yet"
    readers = "all" if found.read == "public" else "users"
    lines = [
        f"{one_line(found.name)}: {one_line(found.kind)}, read by {readers}",
        f"used     {_room(found)}",
        f"publish  {one_line(publish)}",
    ]
    return "\n".join(lines)


def _room(found: Namespace) -> str:
    used = human_size(found.used)
    return used if found.quota is None else f"{used} of {human_size(found.quota)}"
