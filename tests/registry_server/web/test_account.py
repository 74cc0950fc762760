"""The pages of a login: tokens, members and users, and all that must not work."""

import time
from pathlib import Path

import pytest

from registry_server.access import accounts, rights
from registry_server.access.rights import TokenScope
from registry_server.settings import ServerSettings
from registry_server.web.account import LIFETIMES, PERMISSIONS
from tests.registry_server.harness import RegistryHarness, create_registry
from tests.registry_server.web.conftest import Browser, Publish
from tests.registry_server.web.test_login import FORMS, new_browser
from tests.registry_server.web.test_markdown import ParsedHtml
from tests.registry_server.web.test_routes import check_no_active_content, text_of


def send_token_form(browser: Browser, **fields: str) -> tuple[int, str, str]:
    """Send the form for a new token as the page of the account has it now."""
    fields = {"id": accounts.make_token_id(), **fields}
    return browser.send("/account", "/account/tokens", **fields)


@pytest.mark.parametrize("path", FORMS)
def test_without_a_login_forms_lead_to_one(
    path: str, visitor: Browser, served: RegistryHarness, publish: Publish
) -> None:
    assert visitor.send("/login", path)[::2] == (303, "/login")
    headers = {"Authorization": f"Bearer {served.create_token('olga')}"}
    fields = {"form_key": visitor.read_key("/login")}
    answer = visitor.client.post(path, data=fields, headers=headers)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")


def test_a_token_is_made_shown_once_and_revoked(served: RegistryHarness, olga: Browser) -> None:
    fields = {"name": "ci <b>", "days": "30", "permission": "push", "place": "acme"}
    status, text, _ = send_token_form(olga, **fields)
    assert status == 200
    check_no_active_content(text)
    secret = text[text.index("xpt_") :][: accounts.TOKEN_LENGTH]
    made = served.authenticate(secret)
    assert [str(scope) for scope in made.scopes] == ["push:acme"]
    assert made.expires == pytest.approx(time.time() + 30 * 86400, abs=60)
    page = olga.get("/account")[1]
    assert secret not in page
    assert "ci <b> push:acme" in " ".join(text_of(page).split())
    fields = {"id": made.token_id or ""}
    page = f"/account/tokens/revoke?id={made.token_id}"
    assert page in ParsedHtml(olga.get("/account")[1]).links
    confirmation = olga.get(page)[1]
    assert "Revoke the token “ci <b>”?" in text_of(confirmation)
    assert "Among them is this login" not in confirmation
    check_no_active_content(confirmation)
    assert served.client(secret).get("/api/v1/whoami").status_code == 200
    assert olga.send(page, "/account/tokens/revoke", **fields)[::2] == (303, "/account")
    assert served.client(secret).get("/api/v1/whoami").status_code == 401


def test_a_token_may_be_made_without_an_end(served: RegistryHarness, olga: Browser) -> None:
    """It lives as long as the token of the login, not only as long as the login."""
    text = send_token_form(olga, name="all", days="0", permission="")[1]
    made = served.authenticate(text[text.index("xpt_") :][: accounts.TOKEN_LENGTH])
    assert made.expires is None
    assert made.scopes == rights.list_all_scopes(admin=False)


def test_revoking_the_token_of_the_login_ends_it(served: RegistryHarness, visitor: Browser) -> None:
    secret = served.create_user("bob")
    visitor.log_in(secret)
    fields = {"id": served.authenticate(secret).token_id or ""}
    page = f"/account/tokens/revoke?id={fields['id']}"
    assert "Among them is this login" in visitor.get(page)[1]
    visitor.send(page, "/account/tokens/revoke", **fields)
    answer = visitor.client.get(page)
    target = f"/login?next=/account/tokens/revoke%3Fid%3D{fields['id']}"
    assert (answer.status_code, answer.headers["location"]) == (303, target)


def test_every_choice_of_the_form_makes_a_token(served: RegistryHarness, olga: Browser) -> None:
    for permission in PERMISSIONS:
        for days in LIFETIMES:
            fields = {"name": "ci", "days": days, "permission": permission, "place": ""}
            text = send_token_form(olga, **fields)[1]
            made = served.authenticate(text[text.index("xpt_") :][: accounts.TOKEN_LENGTH])
            assert (made.expires is None) == (days == "0")
            assert not permission or [str(scope) for scope in made.scopes] == [permission]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "a name of 1 to 100 characters"),
        ({"name": "x" * 101}, "a name of 1 to 100 characters"),
        ({"name": "two\nlines"}, "one printable line"),
        ({"days": "31"}, "the listed rights and lifetimes"),
        ({"days": ""}, "the listed rights and lifetimes"),
        ({"permission": "admin"}, "the listed rights and lifetimes"),
        ({"place": "../x"}, "such as acme or acme/sql"),
        ({"place": "../x", "name": ""}, "such as acme or acme/sql"),
        ({"permission": "", "place": "acme"}, "what the token may do in the namespace"),
        ({"permission": "push", "place": "acme/sql/"}, "such as acme or acme/sql"),
        ({"id": "x"}, "The form cannot be read"),
    ],
)
def test_a_token_that_cannot_be_made_says_why(
    changes: dict[str, str], message: str, olga: Browser
) -> None:
    fields = {"name": "ci", "days": "7", "permission": "read", "place": ""} | changes
    status, text, _ = send_token_form(olga, **fields)
    assert (status, 'role="alert"' in text) == (400, True)
    assert message in text_of(text)
    assert "xpt_" not in text


def test_what_was_entered_is_kept_with_the_reason_of_a_refusal(olga: Browser) -> None:
    fields = {"name": 'ci "<b>', "days": "7", "permission": "push", "place": "../x"}
    page = ParsedHtml(send_token_form(olga, **fields)[1])
    inputs = {a.get("name"): a.get("value") for tag, a in page.tags if tag == "input"}
    assert (inputs["name"], inputs["place"]) == (fields["name"], fields["place"])
    assert list_chosen(page) == ["7", "push"]
    assert list_chosen(ParsedHtml(olga.get("/account")[1])) == ["90", "read"]


def list_chosen(page: ParsedHtml) -> list[str | None]:
    return [a.get("value") for tag, a in page.tags if tag == "option" and "selected" in a]


def test_a_form_that_is_sent_twice_makes_one_token(served: RegistryHarness, olga: Browser) -> None:
    page = ParsedHtml(olga.get("/account")[1]).tags
    new_id = [a["value"] for tag, a in page if tag == "input" and a.get("name") == "id"][-1]
    fields = {"name": "ci", "days": "7", "permission": "read", "place": "", "id": str(new_id)}
    assert olga.send("/account", "/account/tokens", **fields)[0] == 200
    for _ in range(2):
        status, text, _ = olga.send("/account", "/account/tokens", **fields)
        assert (status, "xpt_" in text) == (409, False)
        assert "This form was sent before" in text_of(text)
        olga.send("/account", "/account/tokens/revoke", id=fields["id"])
    assert olga.client.get("/account/tokens").headers["location"] == "/account"


def test_a_login_with_a_narrow_token_stays_narrow(
    served: RegistryHarness, visitor: Browser, publish: Publish
) -> None:
    publish("hidden/plan")
    visitor.log_in(served.create_token("olga", TokenScope.parse("push:acme")))
    status, text = visitor.get("/account")
    assert status == 200
    assert "This token has fewer rights than you." in text_of(text)
    assert "acme: owner" in text_of(text)
    assert "hidden" not in text_of(text)
    assert visitor.get("/packages/hidden/plan")[0] == 404
    assert "Members" not in visitor.get("/namespaces/acme")[1]
    fields = {"name": "more", "days": "7", "permission": "", "place": ""}
    made = send_token_form(visitor, **fields)[1]
    secret = made[made.index("xpt_") :][: accounts.TOKEN_LENGTH]
    assert [str(scope) for scope in served.authenticate(secret).scopes] == ["push:acme"]
    status, text, _ = send_token_form(visitor, **fields | {"permission": "yank"})
    assert status == 403
    assert "cannot grant the scope yank" in text
    fields = {"user": "olga", "role": "none"}
    assert visitor.send("/account", "/namespaces/acme/members", **fields)[0] == 403


def test_nobody_revokes_the_token_of_another(served: RegistryHarness, olga: Browser) -> None:
    secret = served.create_user("bob")
    fields = {"id": served.authenticate(secret).token_id or ""}
    assert olga.get(f"/account/tokens/revoke?id={fields['id']}")[0] == 404
    assert olga.get("/account/tokens/revoke?id=x")[0] == 400
    assert olga.send("/account", "/account/tokens/revoke", **fields)[0] == 404
    assert olga.send("/account", "/account/tokens/revoke", id="x")[0] == 400
    assert served.client(secret).get("/api/v1/whoami").status_code == 200


def test_an_owner_changes_the_members_of_a_namespace(
    served: RegistryHarness, olga: Browser, publish: Publish
) -> None:
    served.create_user("bob")
    place = "/namespaces/acme"
    leads = (303, f"{place}#members")
    assert olga.send(place, f"{place}/members", user="bob", role="publisher")[::2] == leads
    assert "bob publisher" in text_of(olga.get(place)[1])
    assert olga.send(place, f"{place}/members", user="bob", role="none")[::2] == leads
    assert "bob" not in olga.get(place)[1].replace('placeholder="bob"', "")
    for fields, status in (
        ({"user": "olga", "role": "none"}, 409),
        ({"user": "nobody", "role": "owner"}, 404),
        ({"user": "bob", "role": "king"}, 400),
        ({"user": "B@b", "role": "owner"}, 400),
    ):
        assert olga.send(place, f"{place}/members", **fields)[0] == status


def test_others_see_members_and_change_none(
    served: RegistryHarness, publish: Publish, visitor: Browser
) -> None:
    bob = new_browser(served).log_in(served.create_user("bob"))
    assert "Owners olga" in text_of(visitor.get("/namespaces/acme")[1])
    for browser in (bob, visitor):
        assert "Give the role" not in browser.get("/namespaces/acme")[1]
    fields = {"user": "bob", "role": "owner"}
    assert bob.send("/account", "/namespaces/acme/members", **fields)[0] == 403
    assert bob.send("/account", "/namespaces/gone/members", **fields)[0] == 404


def test_an_admin_makes_and_removes_users(served: RegistryHarness, visitor: Browser) -> None:
    visitor.log_in(served.create_user("boss", admin=True))
    status, text, _ = visitor.send("/users", "/users", name="carla")
    assert status == 200
    secret = text[text.index("xpt_") :][: accounts.TOKEN_LENGTH]
    assert served.authenticate(secret).name == "carla"
    assert not served.authenticate(secret).admin
    assert secret not in visitor.get("/users")[1]
    assert visitor.send("/users", "/users", name="carla")[0] == 409
    assert visitor.send("/users", "/users", name="<b>")[0] == 400
    assert "/users/remove?name=carla" in ParsedHtml(visitor.get("/users")[1]).links
    page = "/users/remove?name=carla"
    assert "Remove the user carla?" in text_of(visitor.get(page)[1])
    check_no_active_content(visitor.get(page)[1])
    assert served.client(secret).get("/api/v1/whoami").status_code == 200
    for name, status in (("nobody", 404), ("%3Cb%3E", 400), ("", 400)):
        assert visitor.get(f"/users/remove?name={name}")[0] == status
    assert visitor.send(page, "/users/remove", name="carla")[::2] == (303, "/users")
    assert served.client(secret).get("/api/v1/whoami").status_code == 401


def test_an_admin_with_a_narrow_token_is_not_led_to_the_users(
    served: RegistryHarness, visitor: Browser
) -> None:
    served.create_user("boss", admin=True)
    visitor.log_in(served.create_token("boss", TokenScope.parse("read")))
    assert "/users" not in ParsedHtml(visitor.get("/account")[1]).links
    full = new_browser(served).log_in(served.create_token("boss"))
    assert "/users" in ParsedHtml(full.get("/account")[1]).links


def test_tokens_are_listed_newest_first_on_pages(served: RegistryHarness, olga: Browser) -> None:
    made = [served.authenticate(served.create_token("olga")).token_id for _ in range(120)]
    seen: list[str] = []
    path: str | None = "/account"
    while path is not None:
        links = [link for link in ParsedHtml(olga.get(path)[1]).links if link]
        seen += [link.partition("id=")[2] for link in links if "revoke?id=" in link]
        path = next((link for link in links if "cursor=" in link), None)
    assert seen[:120] == made[::-1]
    assert len(seen) == 122  # also that of the login, and the first
    assert olga.get(f"/account?cursor={'x' * 101}")[0] == 400


def test_there_are_no_users_for_others(olga: Browser, served: RegistryHarness) -> None:
    assert olga.get("/users")[0] == 404
    assert olga.send("/account", "/users", name="eve")[0] == 404
    assert olga.get("/users/remove?name=olga")[0] == 404
    assert olga.send("/account", "/users/remove", name="olga")[0] == 404
    assert new_browser(served).client.get("/users").headers["location"] == "/login?next=/users"


def test_a_display_name_is_only_text(tmp_path: Path) -> None:
    served = create_registry(ServerSettings(data=tmp_path / "registry", name="<b>Ours</b>"))
    page = served.client().get("/").text
    assert "&lt;b&gt;Ours&lt;/b&gt;" in page
    assert "<b>Ours" not in page
    served.close()
