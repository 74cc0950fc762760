"""The plain formulas in float64 that the numerics of a device are held against."""

import numpy as np
import torch

from benchmarks.cuda import compile_plan, make_random_expert, make_random_weights
from benchmarks.gpu.parts import (
    CPU,
    LIMITS,
    _convert,
    compute_exact_logits,
    judge_error,
    make_little_config,
)
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache

IDS = [(7 * number) % 512 for number in range(20)]


def test_exact_logits_are_those_of_the_decoder_but_for_rounding() -> None:
    config = make_little_config(hidden=64, layers=2)
    weights = make_random_weights(config, CPU, torch.float32)
    found = Decoder(config, weights).prefill(IDS, KVCache(config, 30)).logits
    exact = compute_exact_logits(config, _convert(weights, torch.float64, CPU), IDS, {})
    assert exact.dtype is torch.float64
    assert np.abs(found - exact[-1].numpy()).max() < 1e-5 * float(exact.abs().max())


def test_a_missing_expert_would_be_seen_in_both_dtypes() -> None:
    config = make_little_config(hidden=256, layers=4)
    wide = _convert(make_random_weights(config, CPU), torch.float64, CPU)
    plan = compile_plan(config, [make_random_expert(config, 0, device=CPU)], CPU)
    alone, changed = (compute_exact_logits(config, wide, IDS, each) for each in ({}, plan))
    assert float((alone - changed).abs().max() / alone.abs().max()) > max(LIMITS.values())


def test_an_error_is_judged_by_its_limit() -> None:
    assert judge_error("a", 1e-6, 1e-5).ok
    assert judge_error("a", 2e-5, 1e-5).ok is False
    assert judge_error("a", float("nan"), 1e-5).ok is False
