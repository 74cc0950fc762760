"""How far the predictions of a rounded base are from those in float32, on a text.

Every engine processes the same chunks of tokens and gives the logits of each. Kullback-Leibler
divergences are those of the whole vocabulary, in nats; a prediction is that of the token which
follows in its chunk.
"""

import pydoc_data.topics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trained.start_base import load_model
from benchmarks.trained.training import TOPICS
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import InterleavedPages, PagedKVCache
from expertctl.package.model_config import read_model_config

CHUNK, CHUNKS = 256, 12
"""Tokens of a chunk, and chunks: 3,060 predictions."""
DOCUMENTS = (
    *("docs/tutorial.md", "docs/architecture.md", "docs/contributing.md", "docs/glossary.md"),
    "LICENSE",
)
"""Files of the project. The other part of the text is from the reference of Python's language."""
SHARE = 1500
"""Characters that are taken from each file and topic."""

Numbers = np.ndarray[Any, Any]
ScoreText = Callable[[Sequence[int]], Numbers]
"""Returns the logits of a text, float32 [tokens, vocab]."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a base predicts at one place, beside the reference."""

    divergence: float
    surprise: float
    """Negative logarithm of the probability of the token that follows."""
    same_top: bool
    """Whether the most likely token is that of the reference."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Statistics of all predictions of a base."""

    mean: float
    median: float
    high: float
    """The 99th percentile."""
    top: float
    """Share of predictions with the most likely token of the reference."""
    perplexity: float

    @classmethod
    def summarise(cls, predictions: Iterable[Prediction]) -> "Divergence":
        """Return the statistics of predictions."""
        found = list(predictions)
        far = np.array([one.divergence for one in found])
        surprise = float(np.mean([one.surprise for one in found]))
        same = float(np.mean([one.same_top for one in found]))
        high = float(np.quantile(far, 0.99))
        return cls(float(far.mean()), float(np.median(far)), high, same, float(np.exp(surprise)))


def read_text(project: Path) -> str:
    """Return the beginnings of the project's documents and of Python's language reference."""
    texts = [(project / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    texts += [pydoc_data.topics.topics[name] for name in TOPICS]
    return "\n\n".join(text[:SHARE] for text in texts)


def cut_chunks(tokenizer_file: Path, text: str, *, size: int, count: int) -> list[list[int]]:
    """Return so many chunks of tokens, without a token at the beginning, as the base has it."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer_file)).encode(text, add_special_tokens=False).ids
    assert len(ids) >= size * count, f"the text has {len(ids)} tokens, not {size * count}"
    return [ids[begin : begin + size] for begin in range(0, size * count, size)]


def measure_divergence(
    chunks: Sequence[Sequence[int]], reference: Sequence[Numbers], score: ScoreText
) -> Divergence:
    """Compare a base with the log-probabilities of the reference, float32 [tokens, vocab] each."""
    return Divergence.summarise(
        one
        for ids, expected in zip(chunks, reference, strict=True)
        for one in compare_predictions(ids, expected, score(ids))
    )


def compare_predictions(
    ids: Sequence[int], expected: Numbers, logits: Numbers
) -> Iterator[Prediction]:
    """Yield each prediction of a text: those of its last token have nothing that follows."""
    found, following = normalise(logits[:-1]), np.asarray(ids[1:])
    expected = expected[:-1]
    far = (np.exp(expected) * (expected - found)).sum(1, dtype=np.float64)
    surprise = -found[np.arange(len(following)), following]
    same = found.argmax(1) == expected.argmax(1)
    for values in zip(far.tolist(), surprise.tolist(), same.tolist(), strict=True):
        yield Prediction(*values)


def normalise(logits: Numbers) -> Numbers:
    """Return log-probabilities, float32."""
    shifted = logits - logits.max(1, keepdims=True)
    total = np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64))
    normal: Numbers = shifted - total.astype(np.float32)
    return normal


def compute_reference(directory: Path, chunks: Sequence[Sequence[int]]) -> list[Numbers]:
    """Return the log-probabilities of each chunk in float32, by transformers."""
    import torch

    model = load_model(directory)
    with torch.inference_mode():
        return [normalise(model(torch.tensor([ids])).logits[0].numpy()) for ids in chunks]


class PackedScorer:
    """Our engine on a base in one scheme; close it to end its threads."""

    def __init__(self, directory: Path, scheme: Scheme, *, threads: int = 2) -> None:
        """Load the weights."""
        self._config = read_model_config(directory)
        self.vocabulary = self._config.vocab_size
        base = load_packed_base(directory, self._config, scheme)
        self._pool = ThreadPool(threads)
        self._decoder = PackedDecoder(base, self._pool)
        exact = scheme is Scheme.FLOAT32  # pages are those of `run`
        self._layout = InterleavedPages(Scheme.FLOAT32 if exact else Scheme.FLOAT16)
        self.nbytes = base.nbytes

    def score(self, ids: Sequence[int]) -> Numbers:
        """Process a text as a prompt; return all logits, float32 [tokens, vocab]."""
        found = np.empty((len(ids), self._config.vocab_size), np.float32)

        def record(first: int, logits: Numbers) -> None:
            found[first : first + len(logits)] = logits

        cache = PagedKVCache(self._config, len(ids), layout=self._layout)
        self._decoder.prefill(ids, cache, scores=record)
        return found

    def start(self, ids: Sequence[int], *, capacity: int) -> PagedKVCache:
        """Process the beginning of a sequence of at most ``capacity`` tokens."""
        cache = PagedKVCache(self._config, capacity, layout=self._layout)
        self._decoder.prefill(ids, cache)
        return cache

    def decode(self, token: int, cache: PagedKVCache) -> Numbers:
        """Process one more token; return its logits, float32 [vocab]."""
        return self._decoder.decode(token, cache).logits

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
