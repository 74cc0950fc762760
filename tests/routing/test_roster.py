"""Who may answer, worked out once: positions, reasons, and where the head's rows are."""

import pytest

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.routing.candidate import Installed
from expertctl.routing.index import DEEP_FOLDER, RoutingIndex, Texts
from expertctl.routing.request import RouteRequest, parse_target
from expertctl.routing.roster import Roster
from expertctl.routing.router import roster_of
from expertctl.routing.vector_store import VectorStore
from expertctl.store.base_record import StoredBase
from expertctl.store.flags import Flag
from tests.routing.routed import sorting, sql


def roster(
    index: RoutingIndex, base: StoredBase, *experts: Installed, exclude: str = "", **more: object
) -> Roster:
    targets = (parse_target(exclude),) if exclude else ()
    request = RouteRequest(prompt="any", exclude=targets)
    return roster_of(request, experts, base=base, index=index, **more)  # type: ignore[arg-type]


def test_experts_are_found_by_position_and_their_rows_for_the_head_too(
    index: RoutingIndex, base: StoredBase
) -> None:
    experts = (sorting(), sql())
    made = roster(index, base, *experts)
    for at, expert in made.by_position.items():
        assert index.digest(at) == expert.digest
        assert made.deep.digest(int(made.deep_at[at])) == expert.digest
    assert set(made.by_position.values()) == set(experts) == set(made.usable)
    assert made.deep_at[-1] == -1
    assert made.names >= {"acme/sort", "acme/sql"}


def test_of_those_that_may_not_answer_the_reason_is_kept_and_none_is_found(
    index: RoutingIndex, base: StoredBase
) -> None:
    experts = {
        "excluded": sorting("acme/out"),
        "unsigned": sorting("acme/plain", signer=None),
        "revoked": sorting("acme/gone", revoked=True),
        "made for": sorting("acme/other", arch=Digest.of(b"other")),
        "older than": sorting("acme/sort", "1.0.0"),
        "prerelease": sorting("acme/sort", "3.0.0-rc.1"),
    }
    able = sorting("acme/sort", "2.0.0")
    made = roster(index, base, *experts.values(), able, exclude="acme/out")
    for words, expert in experts.items():
        assert words in made.bars[expert.digest]
    assert [made.by_position[at] for at in made.allowed.positions.tolist()] == [able]
    may = {able, experts["older than"], experts["prerelease"]}
    assert set(made.usable) == may


def test_who_may_join_others_and_who_may_not_answer_is_known_by_position(
    index: RoutingIndex, base: StoredBase
) -> None:
    joining = sorting(composition={"role": "task", "composes_with": ("style",)})
    gaining, other, alone = sql(), sql("acme/other"), sql("acme/alone")
    unsigned = sorting("acme/plain", signer=None)
    gains = {(gaining.digest, other.digest): 0.1}
    made = roster(index, base, joining, gaining, other, alone, unsigned, gains=gains)
    assert {made.by_position[at].ref for at in made.composing} == {
        joining.ref,
        gaining.ref,
        other.ref,
    }
    assert [made.by_position[at] for at in made.barred.tolist()] == [unsigned]


def test_who_refuses_some_prompts_and_who_is_flagged_is_known_by_position(
    index: RoutingIndex, base: StoredBase
) -> None:
    hinted = sorting(hint="has_code=true")
    careful, plain = sql("acme/not", exclude_keywords=("json",)), sql()
    flags = {plain.digest: (Flag("stuffed", "it has 150 keywords"),)}
    made = roster(index, base, hinted, careful, plain, flags=flags)
    assert {made.by_position[at] for at in made.guarded} >= {hinted, careful}
    assert plain not in {made.by_position[at] for at in made.guarded}
    assert [made.by_position[at] for at in made.flagged] == [plain]


def test_what_else_is_in_the_index_is_nobody_here(index: RoutingIndex, base: StoredBase) -> None:
    roster(index, base, sorting(), sql())
    made = roster(index, base, sql())
    assert [expert.ref for expert in made.by_position.values()] == ["acme/sql@1.0.0"]
    assert len(made.allowed.positions) == 1


def test_a_wrong_request_indexes_nothing(index: RoutingIndex, base: StoredBase) -> None:
    with pytest.raises(UsageError):
        roster_of(RouteRequest(prompt=" "), (sorting(),), base=base, index=index)
    assert not index.folder.exists()


class Raced(RoutingIndex):
    """An index of which another process removes the head's rows as soon as they are there."""

    def add(self, experts: Texts) -> None:
        super().add(experts)
        other = VectorStore(
            self.folder / DEEP_FOLDER, self.encoder, dimensions=self.encoder.deep_dimensions
        )
        other.bury([sql().digest])
        self._deep.refresh()


def test_what_another_process_removes_meanwhile_is_not_judged_by_the_rows_of_another(
    index: RoutingIndex, base: StoredBase
) -> None:
    made = roster(Raced(index.folder, index.encoder), base, sorting(), sql())
    assert [made.by_position[at] for at in made.allowed.positions.tolist()] == [sorting()]
