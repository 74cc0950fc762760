"""The experts that a user names, and the selection that holds those of a plan."""

from dataclasses import replace
from typing import Any

import pytest

from expertctl.errors import (
    BaseMismatchError,
    ConflictError,
    IncompatibleError,
    MissingDependencyError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.reference import Digest, Reference
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.plan import compute_plan_identity
from expertctl.routing.request import parse_forced
from expertctl.routing.selection import PlanSelection, SelectedExpert
from expertctl.schema.manifest import AdapterEntry
from expertctl.store.base_record import StoredBase
from tests.routing.experts import (
    Router,
    list_refs,
    make_numeric_settings,
    make_soft_prompt_expert,
    make_sort_expert,
    make_sql_expert,
)


def test_forced_experts_stand_in_the_order_and_with_the_weights_of_the_user(
    router: Router, base: StoredBase
) -> None:
    force = (parse_forced("acme/sql:0.5"), parse_forced("acme/sort@1.0.0"))
    result = router(
        make_sort_expert(), make_sql_expert(), force=force, prompt="What is the capital of France?"
    )
    assert [(e.ref, e.weight) for e in result.plan.experts] == [
        ("acme/sql@1.0.0", 0.5),
        ("acme/sort@1.0.0", 1.0),
    ]
    assert {e.reason for e in result.plan.experts} == {"named by the user"}
    numerics = make_numeric_settings(base)
    ordered = [(e.content_digest, e.weight) for e in result.plan.experts]
    assert result.plan.identity == compute_plan_identity(numerics, ordered)


def test_a_forced_expert_brings_what_it_requires_before_it(router: Router) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",)})
    result = router(needy, make_sql_expert("acme/english"), force=(parse_forced("acme/sort"),))
    assert [(e.ref, e.reason) for e in result.plan.experts] == [
        ("acme/english@1.0.0", "required by acme/sort@1.0.0"),
        ("acme/sort@1.0.0", "named by the user"),
    ]


def test_a_requirement_that_is_forced_too_keeps_the_place_and_weight_of_the_user(
    router: Router,
) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",)})
    force = (parse_forced("acme/sort"), parse_forced("acme/english:0.25"))
    result = router(needy, make_sql_expert("acme/english"), force=force)
    assert [(e.ref, e.weight) for e in result.plan.experts] == [
        ("acme/sort@1.0.0", 1.0),
        ("acme/english@1.0.0", 0.25),
    ]


def test_a_named_version_meets_a_requirement_although_a_newer_one_is_there(
    router: Router,
) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",)})
    experts = (
        needy,
        make_sql_expert("acme/english", "1.0.0"),
        make_sql_expert("acme/english", "1.1.0"),
    )
    force = (parse_forced("acme/english@1.0.0"), parse_forced("acme/sort"))
    assert list_refs(router(*experts, force=force)) == ["acme/english@1.0.0", "acme/sort@1.0.0"]


def test_a_named_version_that_is_not_the_required_one_is_refused(router: Router) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1.2",)})
    experts = (
        needy,
        make_sql_expert("acme/english", "1.0.0"),
        make_sql_expert("acme/english", "1.3.0"),
    )
    force = (parse_forced("acme/english@1.0.0"), parse_forced("acme/sort"))
    with pytest.raises(ConflictError, match="are versions of one package"):
        router(*experts, force=force)


def test_what_is_required_has_a_weight_that_counts(router: Router) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",)})
    experts = (needy, make_sql_expert("acme/english"))

    def weights(*words: str) -> list[float]:
        plan = router(*experts, force=tuple(map(parse_forced, words))).plan
        return [expert.weight for expert in plan.experts]

    with pytest.raises(IncompatibleError, match=r"requires acme/english@1\.0\.0, which has the w"):
        weights("acme/english:0", "acme/sort")
    assert weights("acme/english:0.5", "acme/sort") == [0.5, 1.0]
    assert weights("acme/english:0", "acme/sort:0") == [0.0, 0.0]
    assert weights("acme/sort:0") == [1.0, 0.0]


@pytest.mark.parametrize("weight", ["0.5", "-1", "2"])
def test_a_soft_prompt_has_no_weight_but_one_and_none(router: Router, weight: str) -> None:
    expert = make_soft_prompt_expert("acme/soft", 8)
    for allowed in ("1", "0"):
        plan = router(expert, force=(parse_forced(f"acme/soft:{allowed}"),))
        assert list_refs(plan) == ["acme/soft@1.0.0"]
    with pytest.raises(IncompatibleError, match=r"acme/soft@1\.0\.0 has a soft prompt"):
        router(expert, force=(parse_forced(f"acme/soft:{weight}"),))


def test_an_expert_of_several_adapters_is_of_all_their_kinds(router: Router) -> None:
    both = (
        AdapterEntry("soft_prompt", "p.safetensors", "p.json", "float32", 1, tokens=4),
        AdapterEntry("lora", "adapter.safetensors", "l.json", "float32", 2, 4),
    )
    expert = make_sql_expert()
    expert = replace(expert, manifest=replace(expert.manifest, adapters=both))
    result = router(expert, force=(parse_forced("acme/sql"),))
    assert [planned.kind for planned in result.plan.experts] == ["soft_prompt+lora"]


def test_a_prerelease_and_an_old_version_can_be_named(router: Router) -> None:
    experts = [make_sort_expert(version=v) for v in ("1.0.0", "2.0.0", "3.0.0-rc.1")]
    assert list_refs(router(*experts, force=(parse_forced("acme/sort"),))) == ["acme/sort@2.0.0"]
    assert list_refs(router(*experts, force=(parse_forced("acme/sort@^1"),))) == ["acme/sort@1.0.0"]
    named = router(*experts, force=(parse_forced("acme/sort@3.0.0-rc.1"),))
    assert list_refs(named) == ["acme/sort@3.0.0-rc.1"]


def test_an_unsigned_expert_can_be_forced_and_is_warned_of(router: Router) -> None:
    result = router(make_sort_expert(signer=None), force=(parse_forced("acme/sort"),))
    assert list_refs(result) == ["acme/sort@1.0.0"]
    assert "acme/sort@1.0.0 is unsigned, so its publisher is unknown" in result.warnings


@pytest.mark.parametrize(
    ("experts", "request_", "error", "message"),
    [
        ([], {"force": ("acme/sort",)}, NotFoundError, "acme/sort is not installed"),
        (
            [make_sort_expert()],
            {"force": ("acme/sort@^2",)},
            NotFoundError,
            r"acme/sort@\^2 is not",
        ),
        (
            [make_sort_expert()],
            {"force": ("sha256:" + "0" * 64,)},
            NotFoundError,
            "sha256:0+ is not installed",
        ),
        ([make_sort_expert(revoked=True)], {"force": ("acme/sort",)}, RevokedError, "revoked"),
        (
            [make_sort_expert(arch=Digest.compute(b"x"))],
            {"force": ("acme/sort",)},
            BaseMismatchError,
            "was made for",
        ),
        (
            [make_sort_expert()],
            {"force": ("acme/sort", "acme/sort@1.0.0")},
            UsageError,
            "named twice",
        ),
        (
            [make_sort_expert()],
            {"force": ("acme/sort",), "exclude": (Reference.parse("acme/sort"),)},
            UsageError,
            "both forced and excluded",
        ),
        (
            [make_sort_expert()],
            {"force": ("acme/sort",), "base_alone": True},
            UsageError,
            "both forced and forbidden",
        ),
        (
            [make_sort_expert(), make_sql_expert()],
            {"force": ("acme/sort", "acme/sql"), "max_experts": 1},
            UsageError,
            "2 experts are forced, at most 1",
        ),
        (
            [make_sort_expert(composition={"requires": ("acme/sql@*",)}), make_sql_expert()],
            {"force": ("acme/sort",), "max_experts": 1},
            UsageError,
            "with their requirements, 2 experts",
        ),
        (
            [make_sort_expert(composition={"requires": ("acme/sql@*",)})],
            {"force": ("acme/sort",)},
            MissingDependencyError,
            r"requires acme/sql@\*",
        ),
        (
            [
                make_sort_expert(composition={"requires": ("acme/sql@*",)}),
                make_sql_expert(revoked=True),
            ],
            {"force": ("acme/sort",)},
            MissingDependencyError,
            "no such expert can be used",
        ),
        (
            [make_sort_expert(composition={"conflicts": ("acme/sql@*",)}), make_sql_expert()],
            {"force": ("acme/sql", "acme/sort")},
            ConflictError,
            r"acme/sort@1\.0\.0 conflicts with acme/sql@1\.0\.0",
        ),
        (
            [make_sort_expert(), make_sort_expert(version="2.0.0")],
            {"force": ("acme/sort@1.0.0", "acme/sort@2.0.0")},
            ConflictError,
            "versions of one package",
        ),
        (
            [make_sort_expert(composition={"max_chain": 1}), make_sql_expert()],
            {"force": ("acme/sort", "acme/sql")},
            IncompatibleError,
            "allows at most 1 experts",
        ),
    ],
)
def test_a_forced_plan_that_cannot_be_is_an_error(
    router: Router,
    experts: list[InstalledExpert],
    request_: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    force = tuple(map(parse_forced, request_.pop("force")))
    with pytest.raises(error, match=message):
        router(*experts, force=force, **request_)


def test_a_selection_holds_each_expert_once() -> None:
    selection = PlanSelection(
        [make_sort_expert(), make_sql_expert()], max_experts=2, context=512, gains={}
    )
    selection.check_integrity()
    selection.add(SelectedExpert(make_sort_expert(), 1.0, "first"))
    selection.add(SelectedExpert(make_sql_expert(), 1.0, "second"))
    selection.check_integrity()
    with pytest.raises(IncompatibleError, match="at most 2 are allowed"):
        selection.add(SelectedExpert(make_sort_expert("acme/third"), 1.0, "third"))
    assert [choice.reason for choice in selection.choices] == ["first", "second"]
    selection.choices.append(selection.choices[0])
    with pytest.raises(AssertionError):
        selection.check_integrity()
