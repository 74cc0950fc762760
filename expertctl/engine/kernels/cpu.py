"""What the processor can do that the kernels have a path of their own for."""

from dataclasses import dataclass
from functools import cache

from llvmlite import binding


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor by the two instructions that matter and the width of its registers.

    Everything else is generic vectors of sixteen lanes, which LLVM lowers to what is there.
    """

    name: str
    bf16_dot: bool
    """``vdpbf16ps``: thirty-two bfloat16 products summed to sixteen float32."""
    byte_dot: bool
    """``vpdpbusd``: sixty-four byte products summed to sixteen int32."""
    wide: bool
    """Thirty-two registers of 64 bytes."""

    def plain(self) -> "Cpu":
        """Return the same processor as if it had neither dot instruction."""
        return Cpu(self.name, bf16_dot=False, byte_dot=False, wide=self.wide)


@cache
def host_cpu() -> Cpu:
    """Return the processor of this machine."""
    features = binding.get_host_cpu_features()

    def has(*names: str) -> bool:
        return all(features.get(name, False) for name in names)

    wide = has("avx512f", "avx512bw", "avx512vl")
    return Cpu(
        name=binding.get_host_cpu_name(),
        bf16_dot=wide and has("avx512bf16"),
        byte_dot=wide and has("avx512vnni"),
        wide=wide,
    )
