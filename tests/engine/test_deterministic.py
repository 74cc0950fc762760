"""What `--deterministic` promises of kernels: a token's bits, however those before were read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import InterleavedPages, PagedKVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.packing import pack_base
from tests.factories import write_base

IDS = torch.randint(0, 250, (70,), generator=torch.Generator().manual_seed(0)).tolist()
WAYS = [(512, 70, 1), (512, 70, 2), (512, 30, 2), (16, 70, 1), (7, 64, 2), (1, 70, 1)]
"""Tokens of a stretch, tokens of the prompt, of which the others are read one by one, workers."""


@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize(
    "scheme", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4], ids=lambda s: s.value
)
def test_bits_depend_neither_on_stretches_nor_on_who_wrote_a_token_nor_on_workers(
    scheme: Scheme, numbers: Scheme, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base", hidden=64, head_dim=32, intermediate=96, tie=False)
    config = read_model_config(directory)
    base = pack_base(config, load_base_weights(directory, config), scheme)
    found = []
    for chunk, prompt, workers in WAYS:
        crew = ThreadPool(workers)
        decoder, cache = (
            PackedDecoder(base, crew, chunk=chunk),
            PagedKVCache(config, 80, layout=InterleavedPages(numbers)),
        )
        scores = decoder.prefill(IDS[:prompt], cache).logits
        for token in IDS[prompt:]:
            scores = decoder.decode(token, cache).logits
        crew.close()
        found.append(scores)
    assert np.abs(found[0]).max() > 0
    assert all(np.array_equal(scores, found[0]) for scores in found)
