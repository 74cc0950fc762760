"""Who is asked for a token, and who sees the login: attack 90 without sockets."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import RegistryError, UnauthenticatedError
from expertctl.registry.address import NetworkScope, RegistryAddress
from expertctl.registry.credentials import (
    Challenge,
    Credential,
    LoginSessions,
    check_realm,
    parse_challenges,
)

HOME = RegistryAddress.parse("r.example")
LOCAL = RegistryAddress.parse("127.0.0.1:8080")
BASIC = "Basic bWU6c2VjcmV0"
PUBLIC: frozenset[NetworkScope] = frozenset({"global"})


@dataclass
class Realm:
    """Answers like a token server, and remembers what it was shown."""

    answer: object = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    reached: list[frozenset[NetworkScope] | None] = field(default_factory=list)

    def __call__(
        self, url: str, authorization: str | None, allowed: frozenset[NetworkScope] | None
    ) -> bytes:
        self.asked.append((url, authorization))
        self.reached.append(allowed)
        if isinstance(self.answer, Exception):
            raise self.answer
        return json.dumps(self.answer or {"token": f"t{len(self.asked)}"}).encode()


@dataclass
class ChallengeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def logins(
    realm: Realm, credential: Credential | None, clock: ChallengeClock | None = None
) -> LoginSessions:
    return LoginSessions(lambda _: credential, realm, clock=clock or ChallengeClock())


ME = Credential("me", "secret")


@pytest.mark.parametrize(
    ("header", "challenges"),
    [
        ('Basic realm="x"', [Challenge("basic", {"realm": "x"})]),
        (
            'Bearer realm="https://a/t",service="s",scope="r:a:pull,push"',
            [Challenge("bearer", {"realm": "https://a/t", "service": "s",
                                  "scope": "r:a:pull,push"})],
        ),
        (
            'Bearer realm="a\\"b", Basic realm=plain',
            [Challenge("bearer", {"realm": 'a"b'}), Challenge("basic", {"realm": "plain"})],
        ),
        ("Negotiate, Basic", [Challenge("negotiate", {}), Challenge("basic", {})]),
        ('Bearer realm="first",realm="second"', [Challenge("bearer", {"realm": "first"})]),
        ('realm="nobody\'s"', []),
        ("", []),
        ('Bearer realm="never ends', [Challenge("bearer", {})]),
    ],
)  # fmt: skip
def test_every_challenge_of_a_header_is_read(header: str, challenges: list[Challenge]) -> None:
    assert parse_challenges(header) == challenges


@given(st.text(max_size=300))
def test_no_header_breaks_the_reader(header: str) -> None:
    for challenge in parse_challenges(header):
        assert challenge.scheme == challenge.scheme.lower()


@pytest.mark.parametrize(
    "realm",
    [
        "http://r.example/token", "http://auth.example/token", "https://169.254.169.254/latest",
        "https://[fe80::1]/t", "https://2852039166/t", "https://0xa9fea9fe/t", "https://10.0.0.1/t",
        "https://metadata.google.internal/computeMetadata", "https://metadata/x",
        "https://localhost/t", "https://127.0.0.1:2375/t", "file:///etc/passwd", "gopher://a.example/",
        "https://r.example@evil.example/t", "https://r.example\\@evil.example", "//evil.example/t",
        "https://evil.example/#@r.example", "/token", "", "https://", "https://a b/t", "https://r.example:port/",
    ],
)  # fmt: skip
def test_a_realm_that_reaches_into_a_network_or_is_unencrypted_is_not_asked(realm: str) -> None:
    with pytest.raises(RegistryError) as caught:
        check_realm(realm, HOME)
    assert "nothing was sent" in caught.value.hint


def test_a_realm_is_known_by_its_origin() -> None:
    assert check_realm("https://R.example:443/token?a=b", HOME) == HOME.url
    assert check_realm("https://auth.example/token", HOME) == "https://auth.example"
    assert check_realm("http://127.0.0.1:8080/token", LOCAL) == LOCAL.url
    assert check_realm("http://localhost:9/token", LOCAL) == "http://localhost:9"


def test_the_own_realm_sees_the_login_and_its_token_is_kept_for_a_scope() -> None:
    realm, clock = Realm({"token": "short", "expires_in": 100}), ChallengeClock()
    known = logins(realm, ME, clock)
    header = 'Bearer realm="https://r.example/token",service="r",scope="everything"'
    assert known.initial_authorization(HOME, "repository:a/b:pull") is None
    first = known.answer_challenge(
        HOME, "repository:a/b:pull", header, refused=None, reachable=PUBLIC
    )
    assert first == known.initial_authorization(HOME, "repository:a/b:pull") == "Bearer short"
    url = "https://r.example/token?service=r&scope=repository%3Aa%2Fb%3Apull"
    assert realm.asked == [(url, BASIC)]
    assert known.initial_authorization(HOME, "repository:a/b:pull,push") is None
    clock.now = 91.0
    assert known.initial_authorization(HOME, "repository:a/b:pull") is None


def test_a_realm_on_another_host_does_not_see_the_login() -> None:
    realm = Realm()
    header = 'Bearer realm="https://auth.example/token"'
    assert (
        logins(realm, ME).answer_challenge(HOME, "", header, refused=None, reachable=PUBLIC)
        == "Bearer t1"
    )
    assert realm.asked == [("https://auth.example/token", None)]


def test_a_realm_that_the_person_named_sees_the_login() -> None:
    realm = Realm()
    header = 'Bearer realm="https://auth.example/token?x=1",service="s"'
    named = Credential("me", "secret", "https://auth.example")
    logins(realm, named).answer_challenge(HOME, "", header, refused=None, reachable=PUBLIC)
    assert realm.asked == [("https://auth.example/token?x=1&service=s", BASIC)]
    logins(realm, Credential("me", "secret", "https://auth.example:8443")).answer_challenge(
        HOME, "", header, refused=None, reachable=PUBLIC
    )
    assert realm.asked[-1][1] is None


@pytest.mark.parametrize("named", [None, "https://auth.example"])
def test_only_the_realm_of_the_registry_itself_is_asked_wherever_it_is(named: str | None) -> None:
    realm = Realm()
    known = logins(realm, Credential("me", "secret", named))
    for host in ("auth.example", "r.example"):
        header = f'Bearer realm="https://{host}/token"'
        known.answer_challenge(HOME, host, header, refused=None, reachable=PUBLIC)
    assert realm.reached == [PUBLIC, None]


def test_another_realm_that_refuses_is_named_with_the_way_to_allow_it() -> None:
    realm = Realm(UnauthenticatedError("auth.example: it requires a login"))
    header = 'Bearer realm="https://auth.example/token"'
    with pytest.raises(UnauthenticatedError) as caught:
        logins(realm, ME).answer_challenge(HOME, "", header, refused=None, reachable=PUBLIC)
    assert caught.value.message == "r.example: auth.example: it requires a login"
    assert "--realm https://auth.example" in caught.value.hint


def test_a_registry_that_refuses_at_its_own_realm_is_named_once() -> None:
    realm = Realm(UnauthenticatedError("r.example: the token is wrong"))
    own = 'Bearer realm="https://r.example/t"'
    with pytest.raises(UnauthenticatedError) as caught:
        logins(realm, ME).answer_challenge(HOME, "", own, refused=None, reachable=PUBLIC)
    assert caught.value.message == "r.example: the token is wrong"
    assert caught.value.hint == "log in with `expertctl login r.example`"


def test_a_hostile_scope_does_not_widen_what_is_asked_for() -> None:
    realm = Realm()
    header = 'Bearer realm="https://r.example/t",scope="repository:victim/x:push"'
    logins(realm, ME).answer_challenge(
        HOME, "repository:a/b:pull", header, refused=None, reachable=PUBLIC
    )
    assert realm.asked[0][0].endswith("?scope=repository%3Aa%2Fb%3Apull")


def test_basic_is_answered_once_asked_for_and_remembered_for_every_scope() -> None:
    known = logins(Realm(), ME)
    assert known.initial_authorization(HOME, "a") is None
    assert known.has_sent_login(HOME) is False
    assert (
        known.answer_challenge(HOME, "a", 'Basic realm="x"', refused=None, reachable=PUBLIC)
        == BASIC
    )
    assert known.initial_authorization(HOME, "b") == BASIC
    assert known.has_sent_login(HOME) is True
    assert (
        known.answer_challenge(HOME, "a", 'Basic realm="x"', refused=BASIC, reachable=PUBLIC)
        is None
    )


def test_without_a_login_there_is_nothing_to_say_to_basic() -> None:
    assert (
        logins(Realm(), None).answer_challenge(
            HOME, "", 'Basic realm="x"', refused=None, reachable=PUBLIC
        )
        is None
    )
    assert (
        logins(Realm(), ME).answer_challenge(HOME, "", "Negotiate", refused=None, reachable=PUBLIC)
        is None
    )


def test_a_token_of_ours_is_shown_at_once_and_not_again_when_it_is_refused() -> None:
    realm = Realm()
    known = logins(realm, Credential("me", "xpt_1"))
    assert known.initial_authorization(HOME, "any") == "Bearer xpt_1"
    header = 'Bearer realm="https://r.example/token", Basic realm="x"'
    assert (
        known.answer_challenge(HOME, "any", header, refused="Bearer xpt_1", reachable=PUBLIC)
        is None
    )
    assert realm.asked == []


def test_two_threads_that_are_challenged_at_once_ask_once() -> None:
    realm = Realm()
    known = logins(realm, ME)
    header = 'Bearer realm="https://r.example/t"'
    first = known.answer_challenge(HOME, "s", header, refused=None, reachable=PUBLIC)
    assert known.answer_challenge(HOME, "s", header, refused=None, reachable=PUBLIC) == first
    assert len(realm.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [{"token": ""}, {"token": 1}, {"nothing": "x"}, {"token": "a\r\nb"}, {"token": "a b"},
     {"token": "x" * 20_000}],
)  # fmt: skip
def test_a_realm_without_a_sane_token_is_an_error(answer: dict[str, object]) -> None:
    with pytest.raises(RegistryError, match="no token"):
        logins(Realm(answer), ME).answer_challenge(
            HOME, "", 'Bearer realm="https://r.example/t"', refused=None, reachable=PUBLIC
        )


@pytest.mark.parametrize(
    ("life", "seconds"), [(100, 90), (None, 54), (-5, 54), ("x", 54), (1e99, 54)]
)
def test_how_long_a_token_lives_is_bounded(life: object, seconds: float) -> None:
    clock = ChallengeClock()
    known = logins(Realm({"access_token": "t", "expires_in": life}), ME, clock)
    known.answer_challenge(
        HOME, "s", 'Bearer realm="https://r.example/t"', refused=None, reachable=PUBLIC
    )
    clock.now = seconds - 1
    assert known.initial_authorization(HOME, "s") == "Bearer t"
    clock.now = seconds + 1
    assert known.initial_authorization(HOME, "s") is None
