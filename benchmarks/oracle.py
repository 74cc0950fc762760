"""Checks that a measured decoder gives the right tokens: those of the torch formulas on one base.

A base of two layers with the measured widths is sufficient, because it uses every kernel. The
tokens are greedy; the oracle has the packed weights as float32, and processes the same tokens.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.engine_process import make_prompt_ids
from benchmarks.inputs import make_base_config
from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.cpu.base_loader import create_random_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import PackedBase
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix, unpack_matrix
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]

PROMPT, TOKENS = 40, 8
LAYERS, VOCABULARY = 2, 512
SEED = 12
"""With these weights rounding changes no token in any scheme."""
TOLERANCE = {
    Scheme.FLOAT32: 1e-4,
    Scheme.FLOAT16: 1e-4,
    Scheme.BFLOAT16: 0.03,
    Scheme.INT8: 0.15,
    Scheme.INT5: 0.15,
    Scheme.INT4: 0.15,
}
"""Tolerance between logits and those of the unrounded oracle, as a share of their spread."""


def check_decoder(scheme: Scheme, crew: ThreadPool) -> None:
    """Assert that the kernels of a scheme give the results of the formulas."""
    base = create_random_base(make_small_config(), scheme, seed=SEED)
    check_tokens(base, TorchReference(base), crew)


def check_tokens(base: PackedBase, scores: "TorchReference", crew: ThreadPool) -> None:
    """Assert that kernels give the oracle's logits and tokens on a base."""
    decoder, cache = PackedDecoder(base, crew), PagedKVCache(base.config, PROMPT + TOKENS)
    ids = make_prompt_ids(PROMPT, base.config.vocab_size)
    ours, theirs = decoder.prefill(ids, cache).logits, scores.read(ids)
    for _ in range(TOKENS):
        assert_same(ours, theirs, TOLERANCE[base.scheme])
        token = int(ours.argmax())
        ours, theirs = decoder.decode(token, cache).logits, scores.read([token])


def make_small_config() -> ModelConfig:
    """Return the configuration of the small base."""
    config = make_base_config(vocabulary=VOCABULARY)
    return replace(config, layers=LAYERS, windows=config.windows[:LAYERS])


class TorchReference:
    """The torch decoder with the unpacked weights of a base."""

    def __init__(self, base: PackedBase) -> None:
        """Unpack the weights."""
        numbers = {
            name: unpack_matrix(place) if isinstance(place, PackedMatrix) else place
            for name, place in base.tensor_places().items()
        }
        tensors = {name: torch.from_numpy(each) for name, each in numbers.items()}
        weights = BaseWeights(tensors, torch.float32, torch.device("cpu"))
        self._decoder = Decoder(base.config, weights)
        self._cache = KVCache(base.config, PROMPT + TOKENS)

    def read(self, ids: list[int], deltas: TorchDeltas = EMPTY_DELTAS) -> Numbers:
        """Return the logits after further tokens."""
        return self._decoder.prefill(ids, self._cache, deltas).logits


def assert_same(ours: Numbers, theirs: Numbers, tolerance: float) -> None:
    """Assert that logits agree within a share of their spread, and have the same maximum."""
    assert np.isfinite(ours).all(), "scores are no numbers"
    far = float(np.abs(ours - theirs).max() / theirs.std())
    assert far <= tolerance, f"scores are off by {far:.3g} of their spread"
    assert ours.argmax() == theirs.argmax(), "another token is the likeliest"
