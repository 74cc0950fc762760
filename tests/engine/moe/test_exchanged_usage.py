"""Who is exchanged while a base is served: by a profile at first, then by what it is asked for."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from expertctl.engine.moe import expert_loader
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache
from expertctl.engine.moe.usage_profile import build_prompt_profile
from expertctl.engine.moe.usage_store import ExpertUsageStore
from expertctl.engine.moe.warmup import WarmupPlan, warm_up_cache
from expertctl.engine_config import WarmupConfig
from expertctl.package.model_config import ModelConfig
from expertctl.store.quantised_cache import UsageProfileFile
from tests.engine.moe.test_expert_cache import EXPERTS, LAYERS, NUMBERS, Marked, config, new_cache
from tests.engine.moe.test_start import list_cached_experts, use
from tests.engine.moe.test_usage_store import ROUTED, file
from tests.store.fixtures import fast, package_factory, user_home

__all__ = ["config", "fast", "file", "package_factory", "user_home"]


class CallingThread(Executor):
    """Runs each call when it is submitted, so no read arrives some passes later than in a test."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # the future's, as in a thread
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_loader, "ThreadPoolExecutor", CallingThread)


@dataclass
class CachedModel:
    """A model as far as its expert cache goes."""

    experts: ExpertCache

    @property
    def counters(self) -> Counters:
        return self.experts.counters


HERE = replace(ROUTED, count=EXPERTS, layers=NUMBERS)
USAGE = build_prompt_profile(
    experts=EXPERTS, prompts=40, layers={n: {7: 40, 6: 30} for n in NUMBERS}
)
GUIDE = replace(USAGE, source="a file")


@pytest.mark.parametrize("learns", [True, False])
def test_requests_that_shift_change_who_is_exchanged(
    learns: bool, file: UsageProfileFile, config: ModelConfig
) -> None:
    """Between two learnings scores stay: nobody asks for 6 and 7, and they have all slots."""
    wishes = WarmupConfig(warmup="none", exchange=1.0, learns=learns)
    keeper = ExpertUsageStore(file.bases, wishes)
    with closing(new_cache(Marked(), slots=2, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(wishes, GUIDE))
        keeper.observe(file.base, HERE, CachedModel(cache))
        use(cache, config, (2, 3), passes=100)
        assert list_cached_experts(cache) == [{6, 7}] * LAYERS
        keeper.save()
        use(cache, config, (2, 3), passes=100)
        assert list_cached_experts(cache) == [{2, 3}] * LAYERS
        use(cache, config, (4, 5), passes=300)
        assert list_cached_experts(cache) == [{2, 3}] * LAYERS
        keeper.save()
        use(cache, config, (4, 5), passes=100)
        assert list_cached_experts(cache) == [{4, 5}] * LAYERS
    assert (file.read() is not None) == learns


def test_what_is_learnt_before_anything_is_known_is_exchanged_by_too(
    file: UsageProfileFile, config: ModelConfig
) -> None:
    wishes = WarmupConfig(warmup="none", exchange=1.0)
    keeper = ExpertUsageStore(file.bases, wishes)
    with closing(new_cache(Marked(), slots=2, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(wishes))
        keeper.observe(file.base, HERE, CachedModel(cache))
        use(cache, config, (2, 3), passes=100)
        keeper.save()
        use(cache, config, (4, 5), passes=60)
        assert list_cached_experts(cache) == [{2, 3}] * LAYERS
