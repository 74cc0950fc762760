"""The processor, and what of it the kernels can do without."""

import sys
from pathlib import Path

import pytest

from expertctl.engine.kernels.cpu import host_cpu


@pytest.mark.skipif(sys.platform != "linux", reason="the flags are read where Linux lists them")
def test_the_processor_can_do_what_linux_says_it_can() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    cpu = host_cpu()
    assert cpu.bf16_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= flags)
    assert cpu.byte_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= flags)


def test_a_plain_processor_has_neither_instruction() -> None:
    plain = host_cpu().plain()
    assert not plain.bf16_dot
    assert not plain.byte_dot
    assert (plain.name, plain.wide) == (host_cpu().name, host_cpu().wide)
