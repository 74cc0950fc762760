"""`EligibleExperts`: which installed experts may answer on one base, for any number of prompts.

Most of what decides about an expert does not depend on the prompt: whether it is trusted, fits the
base, was excluded by the user or is an older version. Experts are identified by their position in
the routing index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from expertctl.package.compatibility import NO_HIDDEN_SIZES, HiddenSizes
from expertctl.reference import Digest
from expertctl.routing.candidate import (
    InstalledExpert,
    can_veto,
    explain_misfit,
    explain_untrusted,
    find_superseded,
)
from expertctl.routing.index import RoutingIndex
from expertctl.routing.prompt_normalisation import collect_expert_names
from expertctl.routing.request import RouteRequest, check_request
from expertctl.routing.selection import PairGains, is_excluded
from expertctl.routing.vector_table import Rows, SearchFilter, VectorTable
from expertctl.store.base_record import StoredBase
from expertctl.store.preference import CATCH_ALL, Flag

FlagsByDigest = Mapping[Digest, tuple[Flag, ...]]
"""Content digest → the flags of a suspicious expert; most experts have none."""


@dataclass(frozen=True, eq=False)
class EligibleExperts:
    """The installed experts, and which of them may answer."""

    experts: tuple[InstalledExpert, ...]
    usable: tuple[InstalledExpert, ...]  # may be in a plan; some versions only if required
    ineligible_reasons: Mapping[Digest, str]
    other_bases: Mapping[Digest, str]  # the base of each expert that was made for another one
    flags: FlagsByDigest
    gains: PairGains
    by_position: Mapping[int, InstalledExpert]
    search_filter: SearchFilter
    rerank_table: VectorTable
    rerank_positions: Rows  # index position → position in ``rerank_table``, or -1

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that prompts may use for the experts."""
        return collect_expert_names(str(expert.stored.package) for expert in self.experts)

    @cached_property
    def with_vetoes(self) -> frozenset[int]:
        """The positions of experts that can veto prompts for a reason other than their script."""
        return frozenset(at for at, e in self.by_position.items() if can_veto(e.manifest))

    @cached_property
    def with_vetoes_or_languages(self) -> frozenset[int]:
        """The positions of experts that can veto prompts for any reason."""
        speaking = (at for at, e in self.by_position.items() if e.manifest.routing.languages)
        return self.with_vetoes.union(speaking)

    @cached_property
    def flagged(self) -> frozenset[int]:
        """The positions of flagged experts."""
        return frozenset(at for at, e in self.by_position.items() if self.flags.get(e.digest))

    @cached_property
    def ineligible(self) -> Rows:
        """The positions of experts that may not answer."""
        positions = (
            at for at, e in self.by_position.items() if e.digest in self.ineligible_reasons
        )
        return np.array([at for at in positions if at >= 0], np.int64)

    @cached_property
    def composing(self) -> frozenset[int]:
        """The positions of experts that compose with others."""
        gaining = frozenset(digest for pair in self.gains for digest in pair)
        return frozenset(
            at
            for at, e in self.by_position.items()
            if e.manifest.composition.composes_with or e.digest in gaining
        )

    @cached_property
    def catch_alls(self) -> frozenset[int]:
        """The positions of experts flagged as catch-all."""
        return frozenset(at for at in self.flagged if self._is_catch_all(self.by_position[at]))

    def _is_catch_all(self, expert: InstalledExpert) -> bool:
        return any(flag.code == CATCH_ALL for flag in self.flags[expert.digest])


NO_FLAGS: FlagsByDigest = {}
NO_GAINS: PairGains = {}


def find_eligible_experts(
    request: RouteRequest,
    experts: Sequence[InstalledExpert],
    *,
    base: StoredBase,
    index: RoutingIndex,
    flags: FlagsByDigest = NO_FLAGS,
    gains: PairGains = NO_GAINS,
    widths: HiddenSizes = NO_HIDDEN_SIZES,
) -> EligibleExperts:
    """Index the experts, and return which of them may answer requests like this one on a base.

    ``widths`` are the hidden sizes of the known bases, which make a misfit easier to explain.

    Raises:
        UsageError: when the request itself is wrong; nothing is indexed then.
    """
    check_request(request)
    index.add({expert.digest: expert.manifest for expert in experts})
    allow = request.allow_base_mismatch
    reasons = {e.digest: why for e in experts if (why := explain_ineligible(e, request))}
    misfits = {
        e.digest: (e.manifest.base.name, why)
        for e in experts
        if e.digest not in reasons
        and (why := explain_misfit(e, base.identity, allow_mismatch=allow, widths=widths))
    }
    reasons |= {digest: why for digest, (_, why) in misfits.items()}
    usable = [expert for expert in experts if expert.digest not in reasons]
    older = find_superseded(usable)
    table, rerank_table = index.table, index.rerank_table
    positions = table.find_positions([expert.digest for expert in experts])
    rerank_positions = _find_rerank_positions(table, rerank_table, positions, experts)
    searched = [expert.digest for expert in usable if expert.digest not in older]
    return EligibleExperts(
        experts=tuple(experts),
        usable=tuple(usable),
        ineligible_reasons={**reasons, **older},
        other_bases={digest: name for digest, (name, _) in misfits.items()},
        flags=flags,
        gains=gains,
        by_position=dict(zip(positions.tolist(), experts, strict=True)),
        search_filter=_build_filter(table, searched, rerank_positions),
        rerank_table=rerank_table,
        rerank_positions=rerank_positions,
    )


def explain_ineligible(expert: InstalledExpert, request: RouteRequest) -> str:
    """Return why an expert may not be used on any base; empty when it may."""
    if is_excluded(expert, request.exclude):
        return "excluded by the user"
    return explain_untrusted(expert)


def _build_filter(table: VectorTable, digests: Sequence[Digest], deep_at: Rows) -> SearchFilter:
    """Return a filter that admits experts with vectors for both search and reranking.

    Another process may just have removed some of them.
    """
    mask = np.zeros(len(table) + 1, np.bool_)
    mask[table.find_positions(digests)] = True
    return SearchFilter(table, mask[:-1] & (deep_at[:-1] >= 0))


def _find_rerank_positions(
    table: VectorTable, deep: VectorTable, positions: Rows, experts: Sequence[InstalledExpert]
) -> Rows:
    """Return the rerank position of each index position, -1 where there is none."""
    places = np.full(len(table) + 1, -1, np.int64)  # the last element takes experts at position -1
    places[positions] = deep.find_positions([expert.digest for expert in experts])
    return places
