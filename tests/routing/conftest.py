import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.routing.candidate import NO_FLAGS, NO_GAINS, InstalledExpert, find_eligible_experts
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.router import RoutingResult, route_prompt
from expertctl.schema.validation import find_problems
from expertctl.store.base_record import StoredBase
from tests.factories import make_route_request
from tests.routing.experts import PROMPT, Router, make_base


@pytest.fixture
def base(tmp_path: Path) -> StoredBase:
    return make_base(tmp_path / "base")


@pytest.fixture
def index(tmp_path: Path) -> RoutingIndex:
    return RoutingIndex(tmp_path / "home", LexicalEncoder())


@pytest.fixture
def router(base: StoredBase, index: RoutingIndex) -> Router:
    """Routes among the experts that are given; every result is one that the schema allows."""

    def run(
        *experts: InstalledExpert,
        success: Any = None,
        flags: Any = NO_FLAGS,
        gains: Any = NO_GAINS,
        **fields: Any,
    ) -> RoutingResult:
        request = make_route_request(**{"prompt": PROMPT, "seed": 7, **fields})
        rates = success or {}
        roster = find_eligible_experts(
            request, experts, base=base, index=index, flags=flags, gains=gains
        )
        result = route_prompt(
            request,
            roster,
            base=base,
            index=index,
            success_rate=lambda digest, task: rates.get(digest),
        )
        assert find_problems(json.loads(json.dumps(result.to_json())), "route") == []
        return result

    return run
