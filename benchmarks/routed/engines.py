"""The processes that the benchmark of routed experts compares; each holds one base.

All read the same files, in which tokens say which experts they ask for, so all route alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engine_process import Engine, ReadPrompt
from benchmarks.harness import Seconds, timed
from benchmarks.routed.homes import open_homes
from benchmarks.routed.resident_set import Watch, huge_share, io_bytes, limit_memory
from benchmarks.routed.tasks import Figure, Follow, Keeping, RoutedTask, Tell
from expertctl.engine.kernels.compiled import compiled_cache
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.memory import allocate
from expertctl.engine.packed_base import packed_bytes
from expertctl.package.model_config import read_config
from expertctl.settings import Home

WARM_UP = 96
"""Tokens that each decoder reads before it is measured; slots are learned meanwhile."""
THREADS = 2
OpenRouted = Callable[[], Engine[RoutedTask]]


@dataclass(frozen=True, slots=True)
class Setting:
    """A base in a directory, and how some decoders of it are held.

    ``share`` of the experts is resident where not all are. Texts go through the first ``tokens`` of
    the vocabulary. With ``limit`` the process may have that share of the base's size in memory.
    Compiled kernels are kept below ``home``, as those of runs are, and copies below ``copies``.
    """

    directory: Path
    home: Path
    keepings: tuple[Keeping, ...]
    tokens: int
    scheme: Scheme = Scheme.BFLOAT16
    share: float = 1.0
    limit: float | None = None
    copies: Path | None = None


def ours(setting: Setting) -> OpenRouted:
    """Return what opens our own decoders."""
    return partial(_Ours, setting)


def transformers(directory: Path, dtype: str, experts: str) -> OpenRouted:
    """Return what opens transformers, with its own name for how it multiplies with experts."""
    return partial(_Transformers, directory, dtype, experts)


class _Ours:
    def __init__(self, setting: Setting) -> None:
        compiled_cache(Home(setting.home))
        config = read_config(setting.directory)
        self.weight_bytes = packed_bytes(config, setting.scheme)
        self._watch = Watch()
        if setting.limit is not None:
            limit_memory(int(setting.limit * self.weight_bytes))
            _demand_refusal(self.weight_bytes)
        self._read_before = io_bytes("read_bytes")
        with self._watch:
            self._homes = open_homes(
                setting.directory,
                setting.keepings,
                Crew(THREADS),
                scheme=setting.scheme,
                share=setting.share,
                tokens=setting.tokens,
                copies=setting.copies,
            )
            for home in self._homes.values():
                home.follow(WARM_UP)
        self.about = f"ours, {setting.scheme.value}"

    def run(self, task: RoutedTask, threads: int) -> float:
        """Do a task, or say a figure; what is watched is not timed."""
        assert threads == THREADS
        match task:
            case Follow(keeping, tokens):
                return self._homes[keeping].follow(tokens)
            case ReadPrompt(tokens):
                return self._homes[Keeping.WHOLE].read(tokens)
            case Tell(keeping, figure):
                return float(self._told(keeping, figure))

    def _told(self, keeping: Keeping, figure: Figure) -> float:
        home = self._homes[keeping]
        match figure:
            case Figure.HELD:
                return home.nbytes
            case Figure.GROWN:
                with self._watch:
                    home.follow(WARM_UP)
                return self._watch.grown
            case Figure.DISK:
                return io_bytes("read_bytes") - self._read_before
            case Figure.READ:
                return home.read_bytes
            case Figure.MISSES:
                return home.misses
            case Figure.HUGE:
                return huge_share()


class _Transformers:
    def __init__(self, directory: Path, dtype: str, experts: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        torch.set_num_threads(THREADS)
        self._torch: Any = torch
        self._model = models.from_pretrained(
            directory, dtype=getattr(torch, dtype), experts_implementation=experts
        ).eval()
        self.weight_bytes = sum(each.nbytes for each in self._model.parameters())
        self.about = f"transformers {version('transformers')}, {dtype}, experts: {experts}"

    def run(self, task: RoutedTask, threads: int) -> Seconds:
        """Read a prompt."""
        assert threads == THREADS
        assert isinstance(task, ReadPrompt)
        ids = self._torch.arange(task.tokens)[None]
        return timed(lambda: self._read(ids))()

    def _read(self, ids: object) -> None:
        with self._torch.inference_mode():
            self._model(ids, logits_to_keep=1)


def _demand_refusal(size: int) -> None:
    """Make sure that this process cannot have so much memory."""
    try:
        allocate(size)
    except OSError:
        return
    raise AssertionError(f"{size} bytes were given in spite of the limit")
