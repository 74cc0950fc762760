"""How many items the operations of a run have, which depends on its tokens and on its plans."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.attend import prompt_items
from expertctl.engine.kernels.heads import HeadsShape
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_delta import PackedDeltas, Site

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Rows of a batch that have one plan."""

    plan: PackedDeltas
    first: int
    rows: int


class BatchCounts:
    """Numbers that operations read at each run: int64 [1], or an element for each site or module.

    At a site where some plan has factors, the product of the base is taken apart by modules: there
    `whole` and `plain` are 0, elsewhere `apart`, `scaled` and `expand_apart` are.
    """

    def __init__(
        self,
        shape: HeadsShape,
        adapters: Collection[Scheme],
        sites: Sequence[Site],
        *,
        together: bool,
    ) -> None:
        """Begin with one token; ``together``: all tokens are of one text."""
        self._shape, self._together = shape, together
        self.tokens, self.heads, self.attending = (np.zeros(1, np.int64) for _ in range(3))
        places = np.repeat(np.arange(len(sites)), [len(site.modules) for site in sites])
        self._places, self._has = places, np.zeros(len(sites), np.int64)
        self.plain, self.scaled, self.whole, self._whole = np.zeros((4, len(sites)), np.int64)
        self.apart, self._apart = np.zeros((2, len(places)), np.int64)
        self.reduce = {scheme: np.zeros(len(sites), np.int64) for scheme in adapters}
        self.expand = {scheme: np.zeros(len(sites), np.int64) for scheme in adapters}
        self.reduce_apart = {scheme: np.zeros(len(sites), np.int64) for scheme in adapters}
        self.expand_apart = {scheme: np.zeros(len(sites), np.int64) for scheme in adapters}
        self.adapted, self.done = np.zeros((2, len(sites)), np.int64)
        """Items of each site in one operation, and how many of them are done while it runs."""

    def of_whole(self, site: int, items: int) -> Numbers:
        """Set how many items the product of a site has; return where a run reads their number."""
        self._whole[site] = items
        return self.whole[site : site + 1]

    def of_apart(self, module: int, items: int) -> Numbers:
        """Set how many items the product of a module has; return where a run reads their number."""
        self._apart[module] = items
        return self.apart[module : module + 1]

    def set(self, tokens: int, stretches: Sequence[Stretch]) -> None:
        """Set the numbers for so many tokens, some of them with plans."""
        shape = self._shape
        self.tokens[0] = tokens
        self.heads[0] = tokens * (shape.queries + 2 * shape.keys)
        prompt, step = prompt_items(tokens, shape), tokens * shape.keys
        self.attending[0] = prompt if self._together else step
        for numbers in (*self.reduce.values(), *self.expand.values(), self._has):
            numbers[...] = 0
        for stretch in stretches:
            self._add(stretch.plan)
        has = self._has > 0
        np.multiply(tokens, ~has, out=self.plain)
        np.multiply(tokens, has, out=self.scaled)
        np.multiply(self._whole, ~has, out=self.whole)
        np.multiply(self._apart, has[self._places], out=self.apart)
        self.adapted[...] = self.whole
        for scheme, items in self.reduce.items():
            np.multiply(items, has, out=self.reduce_apart[scheme])
            np.multiply(self.expand[scheme], has, out=self.expand_apart[scheme])
            self.adapted += items
            self.adapted -= self.reduce_apart[scheme]

    def _add(self, plan: PackedDeltas) -> None:
        work = plan.work
        self._has += work.scales
        if plan.width:
            self.reduce[plan.scheme] += work.reduce_prompts if self._together else work.reduce_steps
            self.expand[plan.scheme] += work.expand


def stretches_of(plans: Sequence[PackedDeltas | None]) -> list[Stretch]:
    """Return where rows have a plan; those of one plan stand together."""
    found: list[Stretch] = []
    begin = 0
    for place, plan in enumerate(plans):
        if place + 1 < len(plans) and plans[place + 1] is plan:
            continue
        if plan is not None:
            found.append(Stretch(plan, begin, place + 1 - begin))
        begin = place + 1
    return found
