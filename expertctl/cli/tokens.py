"""``expertctl token``: access tokens of a registry."""

from typing import Annotated

import typer

from expertctl.cli.connection import RegistryOption, connected
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.plain_text import one_line
from expertctl.registry.tokens import Token, new_token, parse_lifetime, revoke_token, tokens
from expertctl.settings import load_settings

app = CommandGroup("Manage your access tokens of a registry.")


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the token is for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, push:acme, push:acme/sql, …; repeatable; else all."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="90d, 12h; default: never.")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a token that may do less than you. It is shown once, on stdout.

    Example: expertctl token new ci --scope push:acme --expires 90d
    """
    lifetime = parse_lifetime(expires) if expires is not None else None
    with connected(load_settings(), None, registry) as connection:
        made = new_token(connection.api, name, scopes=scope or [], lifetime=lifetime)
    document = {**_document(made), "registry": connection.host, "token": made.token}
    emit(document, made.token, as_json=as_json)
    limits = f"may: {', '.join(made.scopes) or 'all that you may'}"
    note(f"{made.id}  {limits}; expires: {made.expires or 'never'}; not shown again")


@app.command("list")
def list_(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List your tokens. Their secrets are nowhere kept.

    Example: expertctl token list
    """
    with connected(load_settings(), None, registry) as connection:
        found = tokens(connection.api)
    document = {"registry": connection.host, "tokens": [_document(token) for token in found]}
    emit(document, _text(found), as_json=as_json)


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `token list` shows it.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take a token back, at once and for good.

    Example: expertctl token revoke 3f2a9c
    """
    with connected(load_settings(), None, registry) as connection:
        revoke_token(connection.api, token_id)
    document = {"registry": connection.host, "revoked": token_id}
    emit(document, f"revoked {token_id}", as_json=as_json)


def _document(token: Token) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scopes": list(token.scopes),
        "created": token.created,
        "expires": token.expires,
        "last_used": token.last_used,
    }


def _text(found: list[Token]) -> str:
    rows = [
        [
            one_line(token.id),
            one_line(token.name),
            one_line(" ".join(token.scopes)) or "all",
            _moment(token.expires),
            _moment(token.last_used),
        ]
        for token in found
    ]
    return table(["ID", "NAME", "SCOPES", "EXPIRES", "LAST USED"], rows) if rows else ""


def _moment(time: str | None) -> str:
    """Return a time to the minute, so that the table fits a terminal."""
    return one_line(time[:16].replace("T", " ")) if time else "never"
