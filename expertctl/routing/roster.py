"""`Roster`: which experts may answer on one base, worked out once for any number of prompts.

Most of what decides about an expert does not depend on the prompt: whether it is trusted, fits the
base, was excluded or is an older version. The result is kept as positions in the index.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.candidate import Installed, may_veto
from expertctl.routing.composition import Gains
from expertctl.routing.found import Allowed
from expertctl.routing.index import RoutingIndex
from expertctl.routing.prompt_view import mentionable
from expertctl.routing.vector_table import Rows, VectorTable
from expertctl.store.flags import GRAB_ALL, Flag

Flags = Mapping[Digest, tuple[Flag, ...]]
"""Content digest → what looks odd about an expert; nothing for most."""


@dataclass(frozen=True, eq=False)
class Roster:
    """The installed experts, and which of them may answer.

    ``bars`` gives the reason for each of the others, ``other_bases`` the base that those were made
    for which were made for another one. The head's rows are ``deep``; ``deep_at`` says
    where those of each position of the index are, -1 where there are none.
    """

    experts: tuple[Installed, ...]
    usable: tuple[Installed, ...]  # those that may stand in a plan; some versions only if asked for
    bars: Mapping[Digest, str]
    other_bases: Mapping[Digest, str]
    flags: Flags
    gains: Gains
    by_position: Mapping[int, Installed]
    allowed: Allowed
    deep: VectorTable
    deep_at: Rows

    @cached_property
    def names(self) -> frozenset[str]:
        """The names by which prompts may call the experts."""
        return mentionable(str(expert.stored.package) for expert in self.experts)

    @cached_property
    def guarded(self) -> frozenset[int]:
        """The positions of experts that refuse some prompts for a reason other than script."""
        return frozenset(at for at, e in self.by_position.items() if may_veto(e.manifest))

    @cached_property
    def speaking(self) -> frozenset[int]:
        """The same, with those of experts that refuse prompts by their script."""
        speaking = (at for at, e in self.by_position.items() if e.manifest.routing.languages)
        return self.guarded.union(speaking)

    @cached_property
    def flagged(self) -> frozenset[int]:
        """The positions of suspicious experts."""
        return frozenset(at for at, e in self.by_position.items() if self.flags.get(e.digest))

    @cached_property
    def barred(self) -> Rows:
        """The positions of experts that may not answer."""
        barred = (at for at, e in self.by_position.items() if e.digest in self.bars)
        return np.array([at for at in barred if at >= 0], np.int64)

    @cached_property
    def composing(self) -> frozenset[int]:
        """The positions of experts that may join others."""
        gaining = frozenset(digest for pair in self.gains for digest in pair)
        return frozenset(
            at
            for at, e in self.by_position.items()
            if e.manifest.composition.composes_with or e.digest in gaining
        )

    @cached_property
    def grabbing(self) -> frozenset[int]:
        """The positions of experts whose examples are about everything."""
        return frozenset(at for at in self.flagged if self._is_grabbing(self.by_position[at]))

    def _is_grabbing(self, expert: Installed) -> bool:
        return any(flag.code == GRAB_ALL for flag in self.flags[expert.digest])


def build_roster(
    experts: Sequence[Installed],
    index: RoutingIndex,
    *,
    bar: Callable[[Installed], str],
    misfit: Callable[[Installed], str],
    passed_over: Callable[[Sequence[Installed]], Mapping[Digest, str]],
    flags: Flags,
    gains: Gains,
) -> Roster:
    """Make sure that experts are indexed, and return which of them may answer.

    ``bar`` says why an expert may not, ``misfit`` why it does not fit the base; ``passed_over`` why
    some that may are not looked at.
    """
    index.add({expert.digest: expert.manifest for expert in experts})
    bars = {expert.digest: why for expert in experts if (why := bar(expert))}
    fit = [expert for expert in experts if expert.digest not in bars]
    misfits = {expert.digest: why for expert in fit if (why := misfit(expert))}
    names = {expert.digest: expert.manifest.base.name for expert in fit}
    bars |= misfits
    usable = [expert for expert in experts if expert.digest not in bars]
    older = passed_over(usable)
    looked_at = [expert.digest for expert in usable if expert.digest not in older]
    table, deep = index.table, index.deep
    positions = table.positions([expert.digest for expert in experts])
    deep_at = _places(table, deep, positions, experts)
    return Roster(
        experts=tuple(experts),
        usable=tuple(usable),
        bars={**bars, **older},
        other_bases={digest: names[digest] for digest in misfits},
        flags=flags,
        gains=gains,
        by_position=dict(zip(positions.tolist(), experts, strict=True)),
        allowed=_allowed(table, looked_at, deep_at),
        deep=deep,
        deep_at=deep_at,
    )


def _allowed(table: VectorTable, digests: Sequence[Digest], deep_at: Rows) -> Allowed:
    """Let through what has rows for the search and rows for the head.

    Another process may have removed some of them a moment ago.
    """
    mask = np.zeros(len(table) + 1, np.bool_)
    mask[table.positions(digests)] = True
    return Allowed(table, mask[:-1] & (deep_at[:-1] >= 0))


def _places(
    table: VectorTable, deep: VectorTable, positions: Rows, experts: Sequence[Installed]
) -> Rows:
    """Return where the deep rows of each position of the index are."""
    places = np.full(len(table) + 1, -1, np.int64)  # one more for what is not in the index: -1
    places[positions] = deep.positions([expert.digest for expert in experts])
    return places
