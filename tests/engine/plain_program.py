"""One batch of rows with plans of their own, on the processor that numba was told of.

Each row has the bits that it has alone, and the scores of the torch formulas on the same weights.
"""

import sys

import torch

from benchmarks.oracle import SEED, TorchScores, small_config
from expertctl.engine.kernels.cpu import host_cpu
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.packed_decoder import PackedDecoder, StepRow
from expertctl.engine.random_base import random_base
from tests.engine.plans import packed_plan, random_expert, torch_plan

CHAINS: tuple[tuple[str, ...], ...] = (
    (), ("lora",), ("ia3",), ("lora", "lora"), ("dora", "ia3"), ("lora", "ia3"),
)  # fmt: skip
IDS = [(7 * place) % 500 for place in range(11)]
OFF = {Scheme.FLOAT16: 1e-3, Scheme.BFLOAT16: 0.06, Scheme.INT8: 0.15}
"""How far scores may be from those that round no token, of their spread."""


def check(scheme: Scheme, crew: Crew) -> float:
    """Return how far scores are from those of the formulas at most, of their spread."""
    config = small_config()
    base = random_base(config, scheme, seed=SEED)
    decoder, far = PackedDecoder(base, crew), 0.0
    dtype = torch.float16 if scheme is Scheme.FLOAT16 else torch.bfloat16
    chains = [
        [
            random_expert(config, kind, seed=10 * number + place, dtype=dtype)
            for place, kind in enumerate(kinds)
        ]
        for number, kinds in enumerate(CHAINS)
    ]
    plans = [packed_plan(config, chain, base=scheme) if chain else None for chain in chains]
    rows, alone = [], []
    for plan in plans:
        pages, own = KVPages(config, 16), KVPages(config, 16)
        for cache in (pages, own):
            decoder.prefill(IDS[:-1], cache, plan)
        rows.append(StepRow(IDS[-1], pages, plan))
        alone.append(decoder.decode(IDS[-1], own, plan).logits)
    together = decoder.step(rows)
    assert torch.equal(together, torch.stack(alone)), "bits depend on who else is there"
    assert not torch.allclose(together[0], together[1], atol=0.1), "experts change nothing"
    for chain, found in zip(chains, together, strict=True):
        wanted = torch.from_numpy(TorchScores(base).read(IDS, torch_plan(config, chain).deltas))
        far = max(far, float((found - wanted).abs().max() / wanted.std()))
    return far


if __name__ == "__main__":
    cpu, crew = host_cpu(), Crew(2)
    assert not any((cpu.wide, cpu.bf16_dot, cpu.byte_dot)), cpu
    for name in sys.argv[1:]:
        scheme = Scheme(name)
        far = check(scheme, crew)
        assert far <= OFF[scheme], f"{name}: scores are off by {far:.3g} of their spread"
        print(f"{name} on {cpu.name}, half {cpu.half}: off by {far:.3g}")
    crew.close()
