"""What a base loses in int8 or int4, measured on a text: the KL divergence from its own weights.

The text is processed twice: in float32, from the files of the base, of which a few rows are in
memory at a time, and by the packed base, with its weights and activations in integers. The mean of
``sum(p * (log p - log q))`` over all positions, in nats, says how much worse ``q``, the
distribution of the packed base over the next token, predicts what the base would generate.

It is measured once for a base and a data type, before the first answer, and kept with the base. In
a data type whose limit it exceeds, a base does not run.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadContext
from expertctl.engine.cpu.backend import (
    MEASURED_TOKENS,
    SCORED_ROWS,
    PackedBackend,
    PackedModel,
    count_measured_tokens,
)
from expertctl.engine.cpu.plain_backend import use_blas_threads
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import open_stored_weights
from expertctl.engine.cpu.schemes import choose_scheme
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine_config import KL_LIMITS, Dtype
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig
from expertctl.routing.plan import NUMERIC_VERSION
from expertctl.store.quantised_cache import LARGE_BYTES, QuantisationQuality, QuantisedCache

if TYPE_CHECKING:
    from expertctl.engine.load_plan import OpenBase

TEXT = """\
The harbour of Bergen has been a market for dried fish since the thirteenth century. Ships from \
Lübeck brought grain, salt and cloth, and left with cod from the northern islands. In 1702 a fire \
destroyed most of the wooden houses along the quay, but they were rebuilt on the old foundations, \
so a visitor today still walks between the same narrow walls.

def read_lines(path, limit=100):
    \"\"\"Return at most `limit` lines of a file, without their line ends.\"\"\"
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for _, line in zip(range(limit), file)]

Question: A train leaves at 9:40 and arrives at 12:15. How long does the journey take?
Answer: From 9:40 to 12:00 it takes two hours and twenty minutes, and fifteen minutes more until \
12:15. The journey takes two hours and thirty-five minutes.

{"name": "Anna Lindqvist", "city": "Uppsala", "orders": [{"item": "lamp", "price": 49.5}]}

Water boils at a lower temperature on a mountain because the air presses on it less. Cooks there \
boil eggs for longer; a pressure cooker does the opposite. Wann fährt der nächste Zug nach Köln? \
Le marché est ouvert tous les jours sauf le lundi.
"""
METHOD = Digest.compute(f"{NUMERIC_VERSION} {MEASURED_TOKENS} {TEXT}".encode())
"""All that a measured value depends on besides the base and its quantisation."""


def find_quality(
    kept: QuantisedCache | None, config: ModelConfig, dtype: Dtype
) -> QuantisationQuality | None:
    """Return what a base is known to lose in a data type; None where it was not measured."""
    if kept is None or dtype not in KL_LIMITS:
        return None
    return kept.read_quality(choose_scheme(config, dtype).value, method=METHOD)


def needs_measuring(base: "OpenBase", kept: QuantisedCache | None) -> bool:
    """Return whether what a base loses must be measured before it answers."""
    backend = base.backend
    assert isinstance(backend, PackedBackend)
    return kept is not None and find_quality(kept, base.config, backend.dtype) is None


def refuse_known_loss(base: "OpenBase", kept: QuantisedCache | None) -> None:
    """Refuse a base that is known to lose too much in its data type, before it is loaded.

    Raises:
        IncompatibleError: if it is.
    """
    backend = base.backend
    assert isinstance(backend, PackedBackend)
    quality = find_quality(kept, base.config, backend.dtype)
    if quality is not None:
        _check_quality(quality, backend.dtype, base=base, kept=kept)


def require_quality(
    base: "OpenBase",
    model: PackedModel,
    context: LoadContext,
    *,
    progress: Progress = ignore_progress,
) -> QuantisationQuality | None:
    """Return what a base loses in its data type, measuring it on ``model`` the first time.

    ``progress`` is called with 0 during the comparison, and may raise. None where nothing can be
    kept with any base on this system, or the tokenizer has no tokens for the text.

    Raises:
        IncompatibleError: if it loses more than the data type allows.
        BaseMismatchError: if the files of the base have changed.
        InvalidPackageError: if they cannot be read.
    """
    backend, kept = base.backend, context.copies
    assert isinstance(backend, PackedBackend)
    if kept is None:
        return None
    quality = find_quality(kept, base.config, backend.dtype)
    if quality is not None:
        _check_quality(quality, backend.dtype, base=base, kept=kept)
        return quality
    tokens = [token for token in base.tokenizer.encode(TEXT) if token < base.config.vocab_size]
    if not tokens:
        return None
    if base.weight_bytes >= LARGE_BYTES:
        context.tell(f"comparing {base.stored.name} in {backend.dtype} with its own weights, once")
    quality = measure_quality(backend, model, tokens, context, between_layers=lambda: progress(0))
    kept.write_quality(backend.scheme.value, quality, method=METHOD)
    _check_quality(quality, backend.dtype, base=base, kept=kept)
    return quality


def measure_quality(
    backend: PackedBackend,
    model: PackedModel,
    ids: Sequence[int],
    context: LoadContext,
    *,
    between_layers: Callable[[], None] = lambda: None,
) -> QuantisationQuality:
    """Compare a packed base with the files of its base, on the first tokens of a text.

    ``between_layers`` is called often and may raise.

    Raises:
        InvalidPackageError: if the files cannot be read.
    """
    config = backend.config
    tokens = list(ids)[: count_measured_tokens(config)]
    with use_blas_threads(context.threads):
        reference = PlainDecoder(config, open_stored_weights(context.directory, config))
        cache = PagedKVCache(config, len(tokens), layout=ROW_PAGES)
        hidden = reference.read_hidden(tokens, cache, between_layers=between_layers)
        reference.free_buffers()
        comparison = _Comparison(reference, hidden, between_layers)
        cache = PagedKVCache(config, len(tokens), layout=backend.page_layout)
        try:
            model.prepare(cache, BASE_ONLY, tokens=len(tokens))
            model.decoder.prefill(tokens, cache, scores=comparison.add)
        finally:
            model.free_buffers()
        return QuantisationQuality(kl=comparison.finish(), predictions=len(tokens))


def _check_quality(
    quality: QuantisationQuality, dtype: Dtype, *, base: "OpenBase", kept: QuantisedCache | None
) -> None:
    """Check that a base loses no more than its data type allows.

    Raises:
        IncompatibleError: if it loses more.
    """
    if _is_within_limit(quality, dtype):
        return
    others = "bf16"
    if dtype == "int4":
        wider = find_quality(kept, base.config, "int8")
        others = "int8 or bf16" if wider is None or _is_within_limit(wider, "int8") else "bf16"
    raise IncompatibleError(
        f"{base.stored.name} loses too much in {dtype}: its predictions differ from those of its "
        f"own weights by a KL divergence of {quality.kl:.3g}, "
        f"and {dtype} allows {KL_LIMITS[dtype]}",
        hint=f"use --dtype {others}",
    )


def _is_within_limit(quality: QuantisationQuality, dtype: Dtype) -> bool:
    """Return whether a base runs in a data type; NaN is above every limit."""
    return quality.kl <= KL_LIMITS[dtype]


class _Comparison:
    """Adds up the KL divergence of rows of logits from those of a reference."""

    def __init__(
        self, reference: PlainDecoder, hidden: AnyArray, between_layers: Callable[[], None]
    ) -> None:
        self._reference, self._hidden, self._between = reference, hidden, between_layers
        self._rows = np.empty((SCORED_ROWS, reference.config.vocab_size), np.float32)
        self._begin = self._filled = 0
        self._total = 0.0

    def add(self, first: int, logits: AnyArray) -> None:
        """Take logits [rows, vocab] of the positions from ``first`` on, in order."""
        assert first == self._begin + self._filled
        for row in logits:
            self._rows[self._filled] = row
            self._filled += 1
            if self._filled == SCORED_ROWS:
                self._compare()

    def finish(self) -> float:
        """Return the mean over all rows; rounding alone may make the sum negative."""
        self._compare()
        assert self._begin == len(self._hidden)
        mean = self._total / len(self._hidden)
        return 0.0 if mean <= 0 else mean

    def _compare(self) -> None:
        """Compare what was taken; the reference reads its head once for all of these rows."""
        if self._filled:
            self._between()
            end = self._begin + self._filled
            with np.errstate(all="ignore"):  # infinite logits give NaN, which is refused
                expected = self._reference.score(self._hidden[self._begin : end])
                self._total += float(compute_kl(expected, self._rows[: self._filled]).sum())
            self._begin, self._filled = end, 0


def compute_kl(expected: AnyArray, logits: AnyArray) -> AnyArray:
    """Return the KL divergence of each row, in nats: float32 [rows, vocab] twice -> [rows]."""
    p, q = (_log_softmax(rows) for rows in (expected, logits))
    q -= p
    np.exp(p, out=p)
    q *= p
    found: AnyArray = -q.sum(axis=1, dtype=np.float64)
    return found


def _log_softmax(logits: AnyArray) -> AnyArray:
    found: AnyArray = logits - logits.max(axis=1, keepdims=True)
    sums = np.exp(found).sum(axis=1, dtype=np.float64, keepdims=True)
    found -= np.log(sums).astype(np.float32)
    return found
