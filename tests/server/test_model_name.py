"""What a ``model`` can be, and that no path and no address is one."""

import pytest

from expertctl.errors import NotFoundError, UsageError
from expertctl.server.settings import ModelSelection, parse_model

BASE = "Qwen/Qwen3-0.6B"


def experts(model: str) -> list[tuple[str, float]]:
    return [
        (str(forced.target), forced.weight) for forced in parse_model(model, base_name=BASE).force
    ]


def test_the_base_answers_alone_by_its_own_name() -> None:
    assert parse_model(BASE, base_name=BASE) == ModelSelection(base_alone=True)


def test_auto_leaves_the_choice_to_the_router() -> None:
    assert parse_model("auto", base_name=BASE) == ModelSelection(auto=True)


def test_experts_are_forced_in_the_order_they_are_named() -> None:
    assert experts("acme/sql") == [("acme/sql", 1.0)]
    assert experts("acme/sql:0.5+zeta/json") == [("acme/sql", 0.5), ("zeta/json", 1.0)]
    assert experts("acme/a@1.2.0:-1+acme/a@^1.3:2") == [("acme/a@1.2.0", -1), ("acme/a@^1.3", 2)]


def test_a_plus_sign_may_belong_to_a_weight() -> None:
    assert experts("acme/a:1e+0+acme/b:+0.5") == [("acme/a", 1.0), ("acme/b", 0.5)]


@pytest.mark.parametrize(
    "model",
    [
        "",
        "gpt-4o",
        "Auto",
        "./x.expert",
        "../../etc/passwd",
        "/etc/passwd",
        "acme/sql/../x",
        "http://127.0.0.1/acme/sql",
        "file:///tmp/x.expert",
        "registry.example.org/acme/sql",
        "localhost:8080/acme/sql",
        "sha256:" + "0" * 64,
        "acme/sql+",
        "+acme/sql",
        "acme/sql acme/json",
        "acme/sql\n",
        "ACME/sql",
        "acme/sql:",
        "acme/sql:a",
        "acme/\u017fql",
        "a/b+" * 1000 + "a/b",
    ],
)
def test_anything_else_is_not_found(model: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        parse_model(model, base_name=BASE)
    assert caught.value.code == "model_not_found"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "model",
    ["acme/sql:11", "+".join(["acme/sql"] * 11), "acme/a@1.x", f"acme/sql@sha256:{'0' * 64}"],
)
def test_what_is_beyond_the_limits_is_refused(model: str) -> None:
    with pytest.raises(UsageError):
        parse_model(model, base_name=BASE)
