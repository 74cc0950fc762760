from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.engine_config import EngineConfig
from expertctl.errors import ExpertError, UsageError
from expertctl.reference import Reference, parse_target
from expertctl.routing.request import ForcedExpert, RouteRequest, check_request, parse_forced

HEX = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("acme/sql", ForcedExpert(Reference.parse("acme/sql"))),
        ("acme/sql@^1.2", ForcedExpert(Reference.parse("acme/sql@^1.2"))),
        ("acme/sql:0.5", ForcedExpert(Reference.parse("acme/sql"), 0.5)),
        ("acme/sql@1.2.0:-1", ForcedExpert(Reference.parse("acme/sql@1.2.0"), -1.0)),
        ("acme/sql@>=1,<2:0", ForcedExpert(Reference.parse("acme/sql@>=1,<2"), 0.0)),
        ("host.example:8080/acme/sql", ForcedExpert(Reference.parse("host.example:8080/acme/sql"))),
        (
            "host.example:8080/acme/sql:2",
            ForcedExpert(Reference.parse("host.example:8080/acme/sql"), 2),
        ),
        (HEX, ForcedExpert(Digest.parse(HEX))),
        (f"{HEX}:0.25", ForcedExpert(Digest.parse(HEX), 0.25)),
    ],
)
def test_a_forced_expert_is_read(text: str, forced: ForcedExpert) -> None:
    assert parse_forced(text) == forced


@pytest.mark.parametrize(
    "text",
    ["", "sql", "acme/sql:", "acme/sql:x", "acme/sql:nan", "acme/sql:11", "acme/sql:inf", ":1",
     "acme/sql@:1", "acme/../x"],
)  # fmt: skip
def test_what_is_no_forced_expert_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_forced(text)


def test_a_target_is_a_reference_or_a_digest() -> None:
    assert parse_target("acme/sql@^1") == Reference.parse("acme/sql@^1")
    assert parse_target(HEX) == Digest.parse(HEX)
    with pytest.raises(ExpertError):
        parse_target("sha256:123")


@given(st.text(alphabet="acme/sql@:.^~0123sha256-", max_size=90) | st.text(max_size=90))
def test_no_text_makes_the_reader_fail_otherwise(text: str) -> None:
    with suppress(ExpertError):
        assert -10 <= parse_forced(text).weight <= 10


def test_the_engine_of_a_request_is_checked_too() -> None:
    with pytest.raises(UsageError, match="--moe-skip-cap"):
        check_request(RouteRequest(prompt="?", config=EngineConfig(moe_skip_cap=2)))
