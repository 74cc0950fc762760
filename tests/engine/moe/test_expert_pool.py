"""Who gives way to the next, held against the plain rule: of those worth least, the oldest."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from expertctl.engine.moe.expert_memory import Expert, ExpertPool

pytestmark = pytest.mark.all

LAYERS, EXPERTS = 3, 5
EXPERT = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
WORTHS = st.lists(
    st.sampled_from([0.0, 0.5, 1.0, 1.0 + 2**-52, np.inf]), min_size=EXPERTS, max_size=EXPERTS
)


class PoolMachine(RuleBasedStateMachine):
    """A pool, and beside it the experts in order of their last use with the plain `min`."""

    @initialize()
    def begin(self) -> None:
        self.pool = ExpertPool(layers=LAYERS, experts=EXPERTS)
        self.plain = OrderedDict[Expert, None]()

    @rule(expert=EXPERT)
    def come(self, expert: Expert) -> None:
        if expert not in self.plain:
            self.pool.add(expert)
            self.plain[expert] = None

    @rule(expert=EXPERT)
    def go(self, expert: Expert) -> None:
        if expert in self.plain:
            self.pool.remove(expert)
            del self.plain[expert]

    @rule(experts=st.lists(EXPERT, max_size=4))
    def are_used(self, experts: list[Expert]) -> None:
        self.pool.touch(experts)
        for expert in experts:
            if expert in self.plain:
                self.plain.move_to_end(expert)

    @rule(layer=st.integers(0, LAYERS - 1), worths=WORTHS)
    def a_layer_is_worth_something_else(self, layer: int, worths: list[float]) -> None:
        self.pool.worths[layer] = worths

    @rule(spared=st.frozensets(EXPERT))
    def one_gives_way(self, spared: frozenset[Expert]) -> None:
        able = (expert for expert in self.plain if expert not in spared)
        worth = {expert: float(self.pool.worths[expert]) for expert in self.plain}
        least = min(able, key=worth.__getitem__, default=None)
        assert self.pool.find_victim(spared) == least
        if least is not None:
            self.go(least)

    @invariant()
    def the_same_are_in_it(self) -> None:
        assert self.pool.members == set(self.plain)
        assert len(self.pool) == len(self.plain)
        assert all((expert in self.pool) for expert in self.plain)


TestPool = PoolMachine.TestCase
