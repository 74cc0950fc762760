"""A server under load for 2,000 requests: callers leave midway, experts come, go and are evicted.

Half an hour of it, with all APIs and at random times, is ``python -m benchmarks.serving_soak``.
"""

import asyncio
import random
import re
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from tests.server.harness import BASE, EXPERTS, ServedPackages
from tests.server.server_process import GenerationServerProcess, run_server
from tests.store.fixtures import HomeFixture

pytestmark = pytest.mark.all
REQUESTS, CLIENTS = 2000, 8
LEAVES = 0.2
"""How many of the callers go away before their answer is whole."""

FREE = re.compile(rb"^vllm:num_requests_running(\{[^}]*\})? 0\.0$", re.MULTILINE)


class SoakLoad:
    """Callers of one server, and what they were answered."""

    def __init__(self, server: GenerationServerProcess) -> None:
        self.server, self.statuses = server, Counter[int]()
        self.left, self.asked, self.drawn = 0, 0, random.Random(0)

    @property
    def goes_on(self) -> bool:
        return self.asked < REQUESTS

    def body(self) -> dict[str, object]:
        model = self.drawn.choice([BASE, "auto", *EXPERTS, "+".join(EXPERTS[:2])])
        words = " ".join(self.drawn.choice(["sort", "dates", "json", "sql"]) for _ in range(8))
        return {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self.drawn.choice([1, 4, 16, 48]),
            "stream": True,
            "temperature": self.drawn.choice([0.0, 1.0]),
            "user": f"somebody {self.drawn.randrange(40)}",
            "n": self.drawn.choice([1, 1, 1, 2]),
        }

    async def call(self, client: httpx2.AsyncClient) -> None:
        while self.goes_on:
            self.asked += 1
            leaves = self.drawn.random() < LEAVES
            async with client.stream("POST", "/v1/chat/completions", json=self.body()) as answer:
                self.statuses[answer.status_code] += 1
                async for _ in answer.aiter_lines():
                    if leaves:
                        self.left += 1
                        break

    async def run(self, until: int) -> None:
        """Go on to so many requests, or to the end."""
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=120) as client:
            callers = [asyncio.create_task(self.call(client)) for _ in range(CLIENTS)]
            while self.goes_on and self.asked < until:
                await asyncio.sleep(0.05)
            if self.goes_on:
                for caller in callers:
                    caller.cancel()
                await asyncio.gather(*callers, return_exceptions=True)
            else:
                await asyncio.gather(*callers)


def come_and_go(user_home: HomeFixture, stock: ServedPackages) -> None:
    """Install an expert again that was removed."""
    expert = next(e for e in user_home.store.list_experts() if str(e.package) == EXPERTS[2])
    user_home.store.remove(expert)
    user_home.install(stock.packages[EXPERTS[2]])


def test_memory_is_flat_and_nothing_is_stuck(stock: ServedPackages, tmp_path: Path) -> None:
    user_home = stock.make_home(tmp_path / "home")
    with run_server(user_home.root, "--rows", "4", "--memory-budget", "8MiB") as server:
        load = SoakLoad(server)
        asyncio.run(load.run(REQUESTS // 4))
        for share in (2, 3):
            come_and_go(user_home, stock)
            asyncio.run(load.run(share * REQUESTS // 4))
        asyncio.run(load.run(10**9))
        assert load.left > load.asked * LEAVES / 2
        assert set(load.statuses) <= {200, 404}  # 404: while an expert is away
        assert load.statuses[200] > 0.9 * load.asked
        busy = time.monotonic() + 30
        while not FREE.search(server.send_request("GET", "/metrics")[2]):
            assert time.monotonic() < busy, "a row is not free"
        assert server.stop() == 0
