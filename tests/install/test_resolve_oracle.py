"""The resolver against trying everything: it finds an answer iff there is one, and a right one."""

from collections.abc import Mapping, Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import ExpertError
from expertctl.install.candidate import InstallCandidate, Requirement
from expertctl.install.resolve import CandidatePool, resolve
from expertctl.reference import Reference
from tests.install.candidates import make_candidate, make_index

NAMES = ["acme/a", "acme/b", "acme/c", "acme/d", "acme/e"]
RANGES = ["*", "1", "2", "3", "^1", "^2", ">=2", "<3", "1.0.0", "3.0.0"]

references = st.builds("{}@{}".format, st.sampled_from(NAMES), st.sampled_from(RANGES))
claims = st.tuples(st.lists(references, max_size=2), st.lists(references, max_size=1))
versions = st.lists(claims, min_size=1, max_size=3)
universes = st.fixed_dictionaries({name: versions for name in NAMES})


def candidates(
    universe: Mapping[str, Sequence[tuple[list[str], list[str]]]],
) -> list[InstallCandidate]:
    return [
        make_candidate(f"{name}@{number}.0.0", requires=requires, conflicts=conflicts)
        for name, releases in universe.items()
        for number, (requires, conflicts) in enumerate(releases, start=1)
    ]


def holds(roots: Sequence[Reference], chosen: Sequence[InstallCandidate]) -> bool:
    """Whether a set of versions meets all that is asked, by its members too."""
    wanted = [*roots, *(r for c in chosen for r in c.requires)]
    refused = [(c, r) for c in chosen for r in c.conflicts]
    met = all(any(c.satisfies(w) for c in chosen) for w in wanted)
    return met and not any(
        o.satisfies(r) for c, r in refused for o in chosen if o.package != c.package
    )


def all_sets(offered: Sequence[InstallCandidate]) -> list[list[InstallCandidate]]:
    by_name = [[None, *(c for c in offered if str(c.package) == name)] for name in NAMES]
    return [[c for c in choice if c] for choice in product(*by_name)]


@settings(max_examples=200, deadline=None)
@given(universes, st.lists(references, min_size=1, max_size=3))
def test_an_answer_is_found_exactly_when_there_is_one_and_it_is_right(
    universe: Mapping[str, Sequence[tuple[list[str], list[str]]]], asked: list[str]
) -> None:
    offered = candidates(universe)
    roots = [Reference.parse(text) for text in asked]
    solvable = any(holds(roots, chosen) for chosen in all_sets(offered))
    try:
        found = resolve([Requirement(r, "you") for r in roots], CandidatePool(make_index(offered)))
    except ExpertError:
        assert not solvable
        return
    chosen = [item.candidate for item in found]
    assert holds(roots, chosen)
    assert len({c.package for c in chosen}) == len(chosen)
