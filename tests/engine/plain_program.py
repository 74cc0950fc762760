"""One batch of rows with plans of their own, on the processor that numba was told of.

Each row has the bits that it has alone, and the scores of the torch formulas on the same weights.
"""

import sys

import torch

from benchmarks.oracle import SEED, TorchReference, make_small_config
from expertctl.engine.cpu.base_loader import create_random_base
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from tests.engine.conftest import stack_logits
from tests.engine.random_experts import make_packed_plan, make_random_expert, make_torch_plan

CHAINS: tuple[tuple[str, ...], ...] = (
    (), ("lora",), ("ia3",), ("lora", "lora"), ("dora", "ia3"), ("lora", "ia3"),
)  # fmt: skip
IDS = [(7 * place) % 500 for place in range(11)]
MAX_ERROR = {Scheme.FLOAT16: 1e-3, Scheme.BFLOAT16: 0.06, Scheme.INT8: 0.15}
"""How far scores may be from those that round no token, of their spread."""


def measure_error(scheme: Scheme, crew: ThreadPool) -> float:
    """Return how far scores are from those of the formulas at most, of their spread."""
    config = make_small_config()
    base = create_random_base(config, scheme, seed=SEED)
    decoder, far = PackedDecoder(base, crew), 0.0
    dtype = torch.float16 if scheme is Scheme.FLOAT16 else torch.bfloat16
    chains = [
        [
            make_random_expert(config, kind, seed=10 * number + place, dtype=dtype)
            for place, kind in enumerate(kinds)
        ]
        for number, kinds in enumerate(CHAINS)
    ]
    plans = [make_packed_plan(config, chain, base=scheme) if chain else None for chain in chains]
    rows, alone = [], []
    for plan in plans:
        pages, own = PagedKVCache(config, 16), PagedKVCache(config, 16)
        for cache in (pages, own):
            decoder.prefill(IDS[:-1], cache, plan)
        rows.append(DecodeRow(IDS[-1], pages, plan))
        alone.append(decoder.decode(IDS[-1], own, plan).logits)
    together = torch.from_numpy(decoder.step(rows))
    assert torch.equal(together, stack_logits(alone)), "bits depend on who else is there"
    assert not torch.allclose(together[0], together[1], atol=0.1), "experts change nothing"
    for chain, found in zip(chains, together, strict=True):
        wanted = torch.from_numpy(
            TorchReference(base).read(IDS, make_torch_plan(config, chain).torch_deltas)
        )
        far = max(far, float((found - wanted).abs().max() / wanted.std()))
    return far


if __name__ == "__main__":
    cpu, crew = get_host_cpu(), ThreadPool(2)
    assert not any((cpu.has_512_bit_registers, cpu.bf16_dot, cpu.byte_dot)), cpu
    for name in sys.argv[1:]:
        scheme = Scheme(name)
        far = measure_error(scheme, crew)
        assert far <= MAX_ERROR[scheme], f"{name}: scores are off by {far:.3g} of their spread"
        print(f"{name} on {cpu.name}, half {cpu.has_float16}: off by {far:.3g}")
    crew.close()
