"""The pages of a login: logging in and out, the account with its tokens, members, and users.

All changes are made by POST of a form with the key of its session, and by the functions of the API,
so that rights, limits and the audit log are the same. A token with fewer rights than its user can
log in, and has no more rights here. A new token is shown once, in the response that creates it. The
form contains the id of the new token, so sending it again creates no other one.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl, quote

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import (
    ConflictError,
    ExpertError,
    ForbiddenError,
    MediaTypeError,
    NotFoundError,
    RateLimitError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.schema.validation import convert_document
from registry_server.access import accounts, rights
from registry_server.access.authentication import Authenticator, get_identity
from registry_server.access.browser_session import (
    MAX_SECONDS,
    FormKey,
    delete_session_cookie,
    end_session,
    set_session_cookie,
    start_session,
)
from registry_server.access.namespaces import list_roles
from registry_server.access.rights import Action, Identity
from registry_server.api import namespaces as namespace_api
from registry_server.api import people
from registry_server.api.schema import ApiContext, ApiInput, ListQuery
from registry_server.errors import get_status
from registry_server.registry import Registry
from registry_server.web.pages import PageView, authorise_page, make_handler
from registry_server.web.rendering import (
    LOCAL_PATH,
    SECURITY_HEADERS,
    render_error_page,
    render_page,
)

_Form = Mapping[str, str]
_FormView = Callable[[Registry, Request, _Form], Response]
_Input = TypeVar("_Input", bound=ApiInput)
MAX_FORM_FIELDS = 20
_FORM_TYPE = "application/x-www-form-urlencoded"
DAY = 86400
_EMPTY_TOKEN_FORM = {"name": "", "days": "90", "permission": "read", "place": ""}
LIFETIMES = {"7": "7 days", "30": "30 days", "90": "90 days", "365": "1 year", "0": "no end"}
"""Choices of the form: days until a new token expires → text."""
PERMISSIONS = {
    "read": "read",
    "push": "read and publish",
    "yank": "read and yank",
    "": "everything that this login may do",
}
"""Choices of the form: the action of the scope of a new token → text."""


def make_account_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the pages that belong to a login."""
    views = (
        ("/login", _show_login),
        ("/account", _require_login(_render_account)),
        ("/account/tokens", _require_login(lambda _, __: _redirect("/account"))),
        ("/account/tokens/revoke", _require_login(_confirm_revocation)),
        ("/users", _require_login(_render_users)),
        ("/users/remove", _require_login(_confirm_removal)),
    )
    forms: tuple[tuple[str, _FormView], ...] = (
        ("/login", _log_in),
        ("/logout", _log_out),
        ("/account/tokens", _create_token),
        ("/account/tokens/revoke", _revoke_token),
        ("/namespaces/{namespace}/members", _change_member),
        ("/users", _create_user),
        ("/users/remove", _remove_user),
    )
    return [
        *(Route(path, make_handler(registry, view), methods=["GET"]) for path, view in views),
        *(Route(path, _handle_form(registry, view), methods=["POST"]) for path, view in forms),
    ]


def _require_login(view: PageView) -> PageView:
    """Return a view that leads to the login, and from there back, where nobody is logged in."""

    def show(registry: Registry, request: Request) -> Response:
        if request.state.session:
            return view(registry, request)
        path, query = request.url.path, request.url.query
        target = quote(f"{path}?{query}" if query else path, safe="/")
        return _redirect(f"/login?next={target}")

    return show


def _handle_form(registry: Registry, view: _FormView) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that checks the key of a form and handles it in a thread."""

    async def handle(request: Request) -> Response:
        try:
            form = await read_form(request)
            if view is _log_in:
                key = FormKey.read_login(request, registry.settings)
            elif request.state.session:
                key = FormKey.read_session(request)
            else:  # it has ended since the page with the form was loaded
                return _redirect("/login")
            key.check(form.get("form_key", ""))
            return await to_thread.run_sync(partial(view, registry, request, form))
        except ExpertError as error:
            return render_error_page(registry, request, error)

    return handle


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        MediaTypeError: when the body is not that of a form.
        UsageError: when it has too many fields, or one twice, or is not UTF-8.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != _FORM_TYPE:
        raise MediaTypeError(f"a form is sent as {_FORM_TYPE}")
    body = await request.body()
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FORM_FIELDS,
        )
    except ValueError as error:
        raise UsageError("the form cannot be read") from error
    form = dict(pairs)
    if len(form) < len(pairs):
        raise UsageError("the form has a field twice")
    return form


def _redirect(path: str) -> Response:
    return RedirectResponse(path, 303, {**SECURITY_HEADERS, "Cache-Control": "no-store"})


def _read_target(text: str) -> str:
    """Return the path of this registry to go to after a login."""
    return text if LOCAL_PATH.fullmatch(text) else "/account"


def _show_login(registry: Registry, request: Request) -> Response:
    target = _read_target(request.query_params.get("next", ""))
    if request.state.session:
        return _redirect(target)
    return _render_login(registry, request, target)


def _render_login(
    registry: Registry, request: Request, target: str, error: ExpertError | None = None
) -> Response:
    key = FormKey.read_login(request, registry.settings)
    values: dict[str, object] = {
        "login_key": key.derive(),
        "target": target,
        "problem": error.message if error else None,
        "hours": MAX_SECONDS // 3600,
    }
    status = 200
    if error is not None:
        status = 403 if isinstance(error, UnauthenticatedError) else get_status(error)
    response = render_page(registry, "login.html", request, values, status=status)
    response.headers["Cache-Control"] = "no-store"
    if isinstance(error, RateLimitError):
        response.headers["Retry-After"] = str(error.retry_after)
    key.set_cookie(response, registry.settings)
    return response


def _log_in(registry: Registry, request: Request, form: _Form) -> Response:
    """Exchange a token for a session; an earlier session of the browser ends."""
    authenticator: Authenticator = request.state.authenticator
    target, address = _read_target(form.get("next", "")), get_identity(request).address or ""
    try:
        identity = authenticator.log_in(form.get("token", "").strip(), address)
    except (UnauthenticatedError, RateLimitError) as error:
        return _render_login(registry, request, target, error)
    assert identity.token_id is not None
    with registry.database.write() as connection:
        if request.state.session:
            end_session(connection, request.state.session)
        secret = start_session(connection, identity.token_id)
        rights.write_audit_row(connection, identity, "session.start", identity.name or "")
    response = _redirect(target)
    set_session_cookie(response, registry.settings, secret)
    return response


def _log_out(registry: Registry, request: Request, _: _Form) -> Response:
    """End the session, and make the browser forget it."""
    identity = get_identity(request)
    with registry.database.write() as connection:
        end_session(connection, request.state.session)
        rights.write_audit_row(connection, identity, "session.end", identity.name or "")
    response = _redirect("/")
    delete_session_cookie(response, registry.settings)
    return response


def _render_account(
    registry: Registry,
    request: Request,
    *,
    created: people.CreatedToken | None = None,
    entered: _Form | None = None,
    error: ExpertError | None = None,
) -> Response:
    context = ApiContext(registry, get_identity(request))
    try:
        tokens: people.TokenPage | None = people.list_tokens(context, _read_cursor(request))
    except ForbiddenError:  # the login has fewer rights than its user
        tokens = None
    with registry.database.read() as connection:
        readable = rights.build_readable_filter(context.identity)
        roles = list_roles(connection, context.identity.user_id or 0, readable)
    values: dict[str, object] = {
        "current": people.whoami(context),
        "tokens": tokens,
        "roles": roles,
        "created": created,
        "problem": error,
        "entered": {**_EMPTY_TOKEN_FORM, **(entered or {})},
        "new_id": accounts.make_token_id(),
        "is_admin": _is_admin(context.identity),
        "lifetimes": LIFETIMES,
        "permissions": PERMISSIONS,
    }
    status = get_status(error) if error else 200
    return render_page(registry, "account.html", request, values, status=status)


def _create_token(registry: Registry, request: Request, form: _Form) -> Response:
    """Create a token and show its secret, which nobody can read again."""
    context = ApiContext(registry, get_identity(request))
    try:
        path = _convert({"id": form.get("id", "")}, people.TokenPath, "the form cannot be read")
        body = _read_token_request(form)
        created = people.create_token_once(context, body, path.id)
    except ConflictError:
        error = ConflictError(
            "this form was sent before, and its token was shown then",
            hint="if you have lost the token, revoke it and make another one",
        )
        return _render_account(registry, request, error=error)
    except (UsageError, ForbiddenError) as error:
        return _render_account(registry, request, entered=form, error=error)
    return _render_account(registry, request, created=created)


def _read_token_request(form: _Form) -> people.TokenRequest:
    """Return the token that a form asks for.

    Raises:
        UsageError: when a field is invalid.
    """
    action, place = form.get("permission", ""), form.get("place", "").strip()
    days = form.get("days", "")
    if action not in PERMISSIONS or days not in LIFETIMES:
        raise UsageError("choose one of the listed rights and lifetimes")
    if place and not action:
        raise UsageError("choose what the token may do in the namespace")
    wanted: dict[str, object] = {}
    if int(days):
        wanted["expires_in"] = int(days) * DAY
    if action:
        wanted["scopes"] = [f"{action}:{place}" if place else action]
        where = "“only in” takes a namespace or a package, such as acme or acme/sql"
        _convert({**wanted, "name": "any"}, people.TokenRequest, where)
    wanted["name"] = form.get("name", "").strip()
    return _convert(wanted, people.TokenRequest, "a token has a name of 1 to 100 characters")


def _convert(document: Mapping[str, object], kind: type[_Input], problem: str) -> _Input:
    try:
        return convert_document(document, kind)
    except msgspec.ValidationError as error:
        raise UsageError(problem) from error


def _confirm_revocation(registry: Registry, request: Request) -> Response:
    """Ask before a token is revoked, which cannot be undone."""
    context = ApiContext(registry, get_identity(request))
    token = people.show_revocable_token(context, _read_token_path(request.query_params))
    text = "All that use it, and the logins that were made with it, stop working at once."
    if token.id == context.identity.token_id:
        text += " Among them is this login."
    values: dict[str, object] = {
        "question": f"Revoke the token “{token.name}”?",
        "text": text,
        "action": "/account/tokens/revoke",
        "field": ("id", token.id),
        "button": "Revoke the token",
        "back": "/account",
    }
    return render_page(registry, "confirm.html", request, values)


def _revoke_token(registry: Registry, request: Request, form: _Form) -> Response:
    people.revoke_token(ApiContext(registry, get_identity(request)), _read_token_path(form))
    return _redirect("/account")


def _read_token_path(given: Mapping[str, str]) -> people.TokenPath:
    return _convert({"id": given.get("id", "")}, people.TokenPath, "this is not the id of a token")


def _change_member(registry: Registry, request: Request, form: _Form) -> Response:
    """Give a user a role in a namespace, or take it away."""
    identity = get_identity(request)
    with registry.database.read() as connection:
        namespace = authorise_page(connection, identity, request.path_params["namespace"]).name
    context = ApiContext(registry, identity)
    place = {"namespace": namespace, "user": form.get("user", "").strip()}
    path = _convert(place, namespace_api.MemberPath, "this is not the name of a user")
    if form.get("role") == "none":
        namespace_api.remove_member(context, path)
    else:
        role = {"role": form.get("role", "")}
        body = _convert(role, namespace_api.RoleRequest, "roles are owner and publisher")
        namespace_api.set_member(context, path, body)
    return _redirect(f"/namespaces/{namespace}#members")


def _render_users(
    registry: Registry, request: Request, *, created: people.CreatedUser | None = None
) -> Response:
    context = ApiContext(registry, get_identity(request))
    _require_admin(context.identity)
    values = {"page": people.list_users(context, _read_cursor(request)), "created": created}
    return render_page(registry, "users.html", request, values)


def _read_cursor(request: Request) -> ListQuery:
    cursor = {"cursor": request.query_params.get("cursor", "")}
    return _convert(cursor, ListQuery, "there is no such page")


def _require_admin(identity: Identity) -> None:
    """Hide the page from all others.

    Raises:
        NotFoundError: when the login is not that of an admin.
    """
    if not _is_admin(identity):
        raise NotFoundError("there is nothing at this address")


def _is_admin(identity: Identity) -> bool:
    return identity.admin and identity.covers(Action.ADMIN, None)


def _confirm_removal(registry: Registry, request: Request) -> Response:
    """Ask before a user is removed, which cannot be undone."""
    identity = get_identity(request)
    _require_admin(identity)
    path = _read_user_path(request.query_params)
    with registry.database.read() as connection:
        name = accounts.get_user(connection, path.name).name
    values: dict[str, object] = {
        "question": f"Remove the user {name}?",
        "text": "All tokens, logins and roles of the user end at once. The name is never given to "
        "another user.",
        "action": "/users/remove",
        "field": ("name", name),
        "button": "Remove the user",
        "back": "/users",
    }
    return render_page(registry, "confirm.html", request, values)


def _remove_user(registry: Registry, request: Request, form: _Form) -> Response:
    identity = get_identity(request)
    _require_admin(identity)
    people.remove_user(ApiContext(registry, identity), _read_user_path(form))
    return _redirect("/users")


def _read_user_path(given: Mapping[str, str]) -> people.UserPath:
    name = {"name": given.get("name", "")}
    return _convert(name, people.UserPath, "this is not the name of a user")


def _create_user(registry: Registry, request: Request, form: _Form) -> Response:
    """Create a user, whose first token is shown once."""
    identity = get_identity(request)
    _require_admin(identity)
    context, name = ApiContext(registry, identity), form.get("name", "").strip()
    wanted = {"name": name, "admin": form.get("admin") == "yes"}
    problem = "a name has lower-case letters, digits and single dashes, 64 at most"
    created = people.create_user(context, _convert(wanted, people.UserRequest, problem))
    return _render_users(registry, request, created=created)
