"""Tokens per second of decoding a merged base, in our engine and in llama.cpp, by threads."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.engine_process import Decode, EngineProcess, MeasuredEngine, make_prompt_ids
from benchmarks.harness import Seconds, take_turns, time_action
from benchmarks.trained.llama_formats import LlamaBase
from expertctl.engine.kernels.packed_format import Scheme

TASK = Decode(tokens=32, context=128)
THREADS = (1, 2)

Opener = Callable[[], MeasuredEngine[Decode]]
SecondsByThreads = dict[int, dict[str, list[Seconds]]]


def open_ours(directory: Path, scheme: Scheme) -> Opener:
    """Return a function that opens our engine on a base."""
    return partial(_PackedEngine, directory, scheme)


def open_llama(path: Path) -> Opener:
    """Return a function that opens llama.cpp on a GGUF file."""
    return partial(_LlamaEngine, path)


def measure_decoding(openers: Mapping[str, Opener], *, rounds: int) -> SecondsByThreads:
    """Decode with every engine in turns; return the seconds of each, by threads and name."""
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(EngineProcess(opener)) for name, opener in openers.items()
        }
        return {
            threads: take_turns(
                {name: engine.bind(TASK, threads) for name, engine in opened.items()},
                rounds=rounds,
            )
            for threads in THREADS
        }


class _PackedEngine:
    def __init__(self, directory: Path, scheme: Scheme) -> None:
        from benchmarks.trained.divergence import PackedScorer
        from expertctl.engine.kernels.jit import use_kernel_cache
        from expertctl.settings import Home

        use_kernel_cache(Home(directory.parent / "home"))
        self._scorers = {n: PackedScorer(directory, scheme, threads=n) for n in THREADS}
        self.weight_bytes = self._scorers[1].nbytes
        self.about = f"ours, {scheme.value}"

    def run(self, task: Decode, threads: int) -> Seconds:
        """Decode with so many threads."""
        scorer = self._scorers[threads]
        ids = make_prompt_ids(task.context + task.tokens, scorer.vocabulary)
        cache = scorer.start(ids[: task.context], capacity=len(ids))
        return _time_steps(lambda token: scorer.decode(token, cache), ids[task.context :])


class _LlamaEngine:
    def __init__(self, path: Path) -> None:
        self._base = LlamaBase(path).__enter__()  # until the process ends
        self.weight_bytes = self._base.nbytes
        self.about = f"llama.cpp, {path.name}"

    def run(self, task: Decode, threads: int) -> Seconds:
        """Decode with so many threads."""
        base = self._base
        base.set_threads(threads)
        base.clear()
        ids = make_prompt_ids(task.context + task.tokens, base.vocabulary)
        base.process(ids[: task.context])
        return _time_steps(lambda token: base.process([token]), ids[task.context :])


def _time_steps(step: Callable[[int], object], tokens: Sequence[int]) -> Seconds:
    return time_action(lambda: [step(token) for token in tokens])()
