"""Bodies of requests: strict JSON of the right shape, or an error that names the field."""

import asyncio
import threading
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from expertctl.errors import UsageError
from expertctl.http.operation import FieldError, parse_body, run_in_turn


class BodyTurn(Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    text: str = ""


class BodyExample(Struct, frozen=True, forbid_unknown_fields=True):
    turns: list[BodyTurn]
    limit: Annotated[int, Meta(ge=1, le=9)] = 5
    share: float = 0.5
    extra: object = None


def test_a_body_becomes_a_value() -> None:
    assert parse_body(b'{"turns": [{"role": "user"}], "limit": 7}', BodyExample) == BodyExample(
        [BodyTurn("user")], 7
    )


def test_a_whole_number_may_be_written_with_a_point() -> None:
    wish = parse_body(b'{"turns": [], "limit": 5.0, "share": 1, "extra": 1.5}', BodyExample)
    assert (wish.limit, wish.share, wish.extra) == (5, 1.0, 1.5)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"turns": [], "limit": "7"}', "limit"),
        (b'{"turns": [], "limit": 0}', "limit"),
        (b'{"turns": [], "limit": 5.5}', "limit"),
        (b'{"turns": [], "limit": true}', "limit"),
        (b'{"turns": [{"role": "user"}, {"role": 1}]}', "turns[1].role"),
        (b'{"turns": [{"role": "user", "colour": 1}]}', "turns[0]"),
        (b'{"turns": {}}', "turns"),
        (b"{}", ""),
        (b'{"turns": [], "other": 1}', ""),
    ],
)
def test_what_has_another_shape_is_refused_by_the_path_of_its_field(
    body: bytes, field: str
) -> None:
    with pytest.raises(FieldError, match="body") as caught:
        parse_body(body, BodyExample)
    assert caught.value.field == field
    assert "/openapi.json" in caught.value.hint


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"turns": []',
        b'{"turns": []}}',
        b'\xef\xbb\xbf{"turns": []}',
        b'{"turns": [{"role": "\xff"}]}',
        b'{"turns": [{"role": "\\ud800"}]}',
        '{"turns": []}'.encode("utf-16"),
        b'{"turns": [], "turns": []}',
        b'{"turns": [], "share": NaN}',
        b'{"turns": [], "share": 1e999}',
        b'{"turns": [], "limit": 99999999999999999999}',
        b'{"turns": [], "extra": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_no_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError, match="the body"):
        parse_body(body, BodyExample)


def test_what_takes_long_is_done_one_after_the_other() -> None:
    at_once, most = 0, 0

    def work() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        threading.Event().wait(0.01)
        at_once -= 1

    async def ask() -> None:
        await asyncio.gather(*(run_in_turn(work) for _ in range(5)))

    asyncio.run(ask())
    assert (at_once, most) == (0, 1)
