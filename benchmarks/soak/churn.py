"""Changes of a home while it is served: experts go, come back, and come in other versions.

Every change is a command of its own, as a person gives it. The times in which a name could not be
found are kept as spans.
"""

import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.soak.house import VERSIONS, House

EXPERTCTL = str(Path(sys.executable).with_name("expertctl"))
EVERY_SECONDS = 20.0
COLLECT = 5
"""Each change of so many is followed by collecting garbage."""
LATE_SECONDS = 2.0
"""How long a server may take to see that an expert is back."""


@dataclass(slots=True)
class Away:
    """From when to when an expert was not there; a version in the place of another counts, too."""

    name: str
    begun: float
    ended: float = float("inf")

    def overlaps(self, *, begun: float, ended: float) -> bool:
        """Tell whether it was away at any moment of a request."""
        return self.begun <= ended and begun <= self.ended + LATE_SECONDS


@dataclass(frozen=True, slots=True)
class Change:
    """One command and what came of it."""

    words: tuple[str, ...]
    at: float
    code: int
    said: str


class Churn:
    """Changes one home, one command after the other."""

    def __init__(self, house: House, *, seed: int) -> None:
        """Begin with the first version of everything installed."""
        self.changes = list[Change]()
        self.away = list[Away]()
        self._house, self._drawn = house, random.Random(seed)  # what changes is no secret
        self._ended = asyncio.Event()
        self._versions: dict[str, str | None] = dict.fromkeys(house.packages, VERSIONS[0])

    async def run(self) -> None:
        """Change something every while, until `end`."""
        self._ended.clear()
        for number in count(1):
            with suppress(TimeoutError):
                pause = EVERY_SECONDS * self._drawn.uniform(0.5, 1.5)
                await asyncio.wait_for(self._ended.wait(), pause)
                return
            gone = [name for name, version in self._versions.items() if version is None]
            await self._change(self._drawn.choice(gone or list(self._versions)))
            if number % COLLECT == 0:
                await self._command("gc")

    def end(self) -> None:
        """Let `run` return once what it is doing is done."""
        self._ended.set()

    async def restore(self) -> None:
        """Install what is away."""
        for name, version in self._versions.items():
            if version is None:
                await self._install(name, VERSIONS[0])

    async def _change(self, name: str) -> None:
        version = self._versions[name]
        other = VERSIONS[1 - VERSIONS.index(version or VERSIONS[0])]
        if version is None:
            await self._install(name, other)
        elif self._drawn.random() < 0.5:
            await self._remove(name, version)
        else:
            await self._command("install", str(self._house.packages[name][other]))
            self.away.append(Away(name, time.monotonic()))
            await self._command("remove", f"{name}@{version}")
            self.away[-1].ended = time.monotonic()
            self._versions[name] = other

    async def _install(self, name: str, version: str) -> None:
        await self._command("install", str(self._house.packages[name][version]))
        for span in self.away:
            if span.name == name:
                span.ended = min(span.ended, time.monotonic())
        self._versions[name] = version

    async def _remove(self, name: str, version: str) -> None:
        self.away.append(Away(name, time.monotonic()))
        self._versions[name] = None
        await self._command("remove", f"{name}@{version}")

    async def _command(self, *words: str) -> None:
        at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(EXPERTCTL, *words, "--json"),
            env={**os.environ, "EXPERT_HOME": str(self._house.home.root)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert process.returncode is not None
        self.changes.append(Change(words, at, process.returncode, said.decode(errors="replace")))
