"""Who may answer, worked out once: positions, reasons, and where the head's rows are."""

import pytest

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.reference import parse_target
from expertctl.routing.candidate import EligibleExperts, InstalledExpert, find_eligible_experts
from expertctl.routing.index import RERANK_FOLDER, ManifestsByDigest, RoutingIndex, VectorStore
from expertctl.routing.request import RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.preference import Flag
from tests.routing.experts import make_sort_expert, make_sql_expert


def make_eligible_experts(
    index: RoutingIndex,
    base: StoredBase,
    *experts: InstalledExpert,
    exclude: str = "",
    **more: object,
) -> EligibleExperts:
    targets = (parse_target(exclude),) if exclude else ()
    request = RouteRequest(prompt="any", exclude=targets)
    return find_eligible_experts(request, experts, base=base, index=index, **more)  # type: ignore[arg-type]


def test_experts_are_found_by_position_and_their_rows_for_the_head_too(
    index: RoutingIndex, base: StoredBase
) -> None:
    experts = (make_sort_expert(), make_sql_expert())
    made = make_eligible_experts(index, base, *experts)
    for at, expert in made.by_position.items():
        assert index.table.digest_at(at) == expert.digest
        assert made.rerank_table.digest_at(int(made.rerank_positions[at])) == expert.digest
    assert set(made.by_position.values()) == set(experts) == set(made.usable)
    assert made.rerank_positions[-1] == -1
    assert made.names >= {"acme/sort", "acme/sql"}


def test_of_those_that_may_not_answer_the_reason_is_kept_and_none_is_found(
    index: RoutingIndex, base: StoredBase
) -> None:
    experts = {
        "excluded": make_sort_expert("acme/out"),
        "unsigned": make_sort_expert("acme/plain", signer=None),
        "revoked": make_sort_expert("acme/gone", revoked=True),
        "made for": make_sort_expert("acme/other", arch=Digest.compute(b"other")),
        "older than": make_sort_expert("acme/sort", "1.0.0"),
        "prerelease": make_sort_expert("acme/sort", "3.0.0-rc.1"),
    }
    able = make_sort_expert("acme/sort", "2.0.0")
    made = make_eligible_experts(index, base, *experts.values(), able, exclude="acme/out")
    for words, expert in experts.items():
        assert words in made.ineligible_reasons[expert.digest]
    assert [made.by_position[at] for at in made.search_filter.positions.tolist()] == [able]
    may = {able, experts["older than"], experts["prerelease"]}
    assert set(made.usable) == may


def test_who_may_join_others_and_who_may_not_answer_is_known_by_position(
    index: RoutingIndex, base: StoredBase
) -> None:
    joining = make_sort_expert(composition={"role": "task", "composes_with": ("style",)})
    gaining, other, alone = (
        make_sql_expert(),
        make_sql_expert("acme/other"),
        make_sql_expert("acme/alone"),
    )
    unsigned = make_sort_expert("acme/plain", signer=None)
    gains = {(gaining.digest, other.digest): 0.1}
    made = make_eligible_experts(index, base, joining, gaining, other, alone, unsigned, gains=gains)
    assert {made.by_position[at].ref for at in made.composing} == {
        joining.ref,
        gaining.ref,
        other.ref,
    }
    assert [made.by_position[at] for at in made.ineligible.tolist()] == [unsigned]


def test_who_refuses_some_prompts_and_who_is_flagged_is_known_by_position(
    index: RoutingIndex, base: StoredBase
) -> None:
    hinted = make_sort_expert(hint="has_code=true")
    careful, plain = make_sql_expert("acme/not", exclude_keywords=("json",)), make_sql_expert()
    flags = {plain.digest: (Flag("stuffed", "it has 150 keywords"),)}
    made = make_eligible_experts(index, base, hinted, careful, plain, flags=flags)
    assert {made.by_position[at] for at in made.with_vetoes} >= {hinted, careful}
    assert plain not in {made.by_position[at] for at in made.with_vetoes}
    assert [made.by_position[at] for at in made.flagged] == [plain]


def test_what_else_is_in_the_index_is_nobody_here(index: RoutingIndex, base: StoredBase) -> None:
    make_eligible_experts(index, base, make_sort_expert(), make_sql_expert())
    made = make_eligible_experts(index, base, make_sql_expert())
    assert [expert.ref for expert in made.by_position.values()] == ["acme/sql@1.0.0"]
    assert len(made.search_filter.positions) == 1


def test_a_wrong_request_indexes_nothing(index: RoutingIndex, base: StoredBase) -> None:
    with pytest.raises(UsageError):
        find_eligible_experts(
            RouteRequest(prompt=" "), (make_sort_expert(),), base=base, index=index
        )
    assert not index.folder.exists()


class RacingIndex(RoutingIndex):
    """An index of which another process removes the head's rows as soon as they are there."""

    def add(self, experts: ManifestsByDigest) -> None:
        super().add(experts)
        other = VectorStore(
            self.folder / RERANK_FOLDER, self.encoder, dimensions=self.encoder.rerank_dimensions
        )
        other.remove([make_sql_expert().digest])
        self._deep.refresh()


def test_what_another_process_removes_meanwhile_is_not_judged_by_the_rows_of_another(
    index: RoutingIndex, base: StoredBase
) -> None:
    made = make_eligible_experts(
        RacingIndex(index.folder, index.encoder), base, make_sort_expert(), make_sql_expert()
    )
    assert [made.by_position[at] for at in made.search_filter.positions.tolist()] == [
        make_sort_expert()
    ]
