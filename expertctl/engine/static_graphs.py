"""Captured steps: on a CUDA device a step is recorded once and replayed; elsewhere it is called.

A captured step reads and writes tensors that stay where they are; its temporary ones come from one
pool. All graphs share it: one runs at a time, and nothing in it outlives a run. The caller says how
many there are at most; beyond that all go, never one alone. They were captured on one stream, which
no other owner has, and torch, letting go of one, lets go of the workspace that its libraries have
for that stream, whose address the others hold (pytorch#193402).
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from expertctl.engine.device_streams import LentStream, lend_stream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Function = Callable[[], None]


class Graphs:
    """The owner of the graphs of one device, by what they were captured for."""

    def __init__(
        self, device: torch.device, *, captures: bool = True, most: int | None = None
    ) -> None:
        """Begin with none; without ``captures`` every function is called as it is.

        There are no more than ``most``, which is more than one run over all stages needs.
        """
        self._device, self._most = device, most
        self._captures = captures and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._side: LentStream | None = None  # after the graphs, which go before it is given back
        self.captured = 0
        """How many were captured so far."""

    def run(self, key: Hashable, function: Function) -> None:
        """Do what ``function`` does; calls with one key must do the same with the same tensors.

        It may be called twice the first time, so doing it again must change nothing.
        """
        if not self._captures:
            function()
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._make_room()
            graph = self._graphs[key] = self._capture(function)
        graph.replay()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def clear(self) -> None:
        """Let go of all, and of the pool."""
        self._graphs, self._pool = {}, None

    def _make_room(self) -> None:
        if self._most is not None and len(self._graphs) >= self._most:
            torch.cuda.current_stream(self._device).synchronize()  # the last one may be under way
            self.clear()

    def _capture(self, function: Function) -> torch.cuda.CUDAGraph:
        """Call once so that libraries have what they need, then record.

        Other threads may use the device meanwhile. A pool without graphs is gone, so after a first
        capture that failed the next one begins with another pool.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        self._side = self._side or lend_stream(self._device, computes=True)
        side, graph = self._side.stream, torch.cuda.CUDAGraph()
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):  # torch does not leave the stream if a capture fails
                function()
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    function()
        finally:  # what was called before an error is under way, and writes what the next one reads
            here.wait_stream(side)
        self.captured += 1
        return graph
