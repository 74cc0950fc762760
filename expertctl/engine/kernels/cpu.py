"""The features of the processor for which the kernels have paths of their own."""

import platform
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numba
from llvmlite import binding
from numba.core.codegen import get_host_cpu_features


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor by the instructions that matter and the width of its registers.

    Everything else is generic vectors of sixteen lanes, which LLVM lowers to what is there.
    """

    name: str
    bf16_dot: bool
    """``vdpbf16ps``: thirty-two bfloat16 products summed to sixteen float32."""
    byte_dot: bool
    """``vpdpbusd``: sixty-four byte products summed to sixteen int32."""
    short_dot: bool
    """``vpmaddwd``: sixteen products of int16 summed to eight int32, and the same of bytes."""
    wide: bool
    """Thirty-two registers of 64 bytes."""
    half: bool
    """float32 to float16 and back."""

    def plain(self) -> "Cpu":
        """Return the same processor as if it had no dot instruction."""
        return replace(self, bf16_dot=False, byte_dot=False, short_dot=False)


@cache
def host_cpu() -> Cpu:
    """Return the processor that numba compiles for: this machine's, or the one it was told."""
    features = compiled_features()
    wide = {"avx512f", "avx512bw", "avx512vl"} <= features
    return Cpu(
        name=numba.config.CPU_NAME or binding.get_host_cpu_name(),
        bf16_dot=wide and "avx512bf16" in features,
        byte_dot=wide and "avx512vnni" in features,
        short_dot="avx2" in features,
        wide=wide,
        half=_has_half(features, platform.machine().lower()),
    )


def compiled_features() -> frozenset[str]:
    """Return the features that code is compiled for.

    If ``NUMBA_CPU_FEATURES`` is set, only those that it names, whatever the processor's name says.
    """
    told = numba.config.CPU_FEATURES
    listed = get_host_cpu_features() if told is None else told
    there: dict[str, bool] = {}
    for feature in filter(None, (each.strip() for each in listed.split(","))):
        there[feature.lstrip("+-")] = not feature.startswith("-")
    return frozenset(name for name, has in there.items() if has)


def _has_half(features: frozenset[str], machine: str) -> bool:
    """AArch64 always has it; elsewhere a feature must say so. Integers are always right."""
    if machine in {"aarch64", "arm64"}:
        return True
    return "avx512f" in features or {"avx", "f16c"} <= features


def sold_as() -> str:
    """Return the name under which the processor is sold, as far as the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or sys.platform)
