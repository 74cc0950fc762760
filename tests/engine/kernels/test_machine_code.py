"""Machine code does the same as an image and as an object file; what has no image is noticed."""

import math
import mmap
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import binding
from numba import types

from expertctl.engine.kernels import machine_code as module
from expertctl.engine.kernels.compiled import compiler
from expertctl.engine.kernels.compiled.compiler import compile_function
from expertctl.engine.kernels.compiled.lora import make_gemm
from expertctl.engine.kernels.compiled.memory import float32_view, int64_view
from expertctl.engine.kernels.compiled.object_file import UnsupportedObjectError, make_image
from expertctl.engine.kernels.lora import gemm_arguments, gemm_items
from expertctl.engine.kernels.machine_code import (
    CodeImage,
    cpu_model_name,
    identify_processor,
    load_code,
)
from expertctl.engine.kernels.packed_format import LANES, PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix
from expertctl.errors import KernelsUnavailableError
from tests.engine.kernels.reference_gemm import make_random_numbers, quantise_rows

LINUX_X86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="images are of Linux on x86"
)
TABLE = np.array([11, -5, 1 << 40, 3, 8, 1])
"""Compiled code looks numbers of a constant up."""


def add_six(a: int, b: int, c: int, d: int, e: int, f: int) -> int:  # pragma: no cover (compiled)
    return a - 2 * b + 3 * c - 4 * d + 5 * e - 6 * f


def look_up(index: int) -> int:  # pragma: no cover (compiled)
    return TABLE[index]  # type: ignore[no-any-return]


def write_sines(first: int, last: int, address: int) -> None:  # pragma: no cover (compiled)
    out = float32_view(address, last)
    for k in range(first, last):
        out[k] = math.sin(k) * math.cos(k)


def clear(first: int, last: int, address: int) -> None:  # pragma: no cover (compiled)
    out = int64_view(address, last)
    for k in range(first, last):
        out[k] = 0


@cache
def make_object(function: Callable[..., object], arity: int) -> bytes:
    """The object file of a function, even if it has an image."""
    with pytest.MonkeyPatch.context() as patch:

        def refuse(_code: bytes) -> CodeImage:
            raise UnsupportedObjectError

        patch.setattr(compiler, "make_image", refuse)
        return compile_function(function, arity=arity)


@cache
def make_product(scheme: Scheme) -> Callable[..., object]:
    """The same function each time, which is compiled once for both formats."""
    return make_gemm(scheme)


@cache
def compile_with_numba(kernel: Callable[..., object]) -> Callable[..., object]:
    """A kernel as numba itself makes it callable."""
    call: Callable[..., object] = numba.cfunc(types.void(*[types.int64] * 3))(kernel).ctypes
    return call


@pytest.fixture(params=["image", "object file"])
def load(request: pytest.FixtureRequest) -> Callable[..., Callable[..., int]]:
    """Compile a function in one of the two formats and load it."""
    if request.param == "image" and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("images are of Linux on x86")

    def load(function: Callable[..., object], *, arity: int) -> Callable[..., int]:
        code = make_object(function, arity)
        if request.param == "image":
            code = make_image(code).to_bytes()
        return load_code(code, arity=arity).call

    return load


def test_arguments_and_results_are_passed(load: Callable[..., Callable[..., int]]) -> None:
    call = load(add_six, arity=6)
    assert call(1, 2, 3, 4, 5, 6) == -21
    assert call(1 << 62, 0, 0, 0, 0, 0) == 1 << 62
    assert call(-1, 0, 0, 0, 0, 0) == -1


def test_constants_and_functions_of_the_c_library_are_found(
    load: Callable[..., Callable[..., int]],
) -> None:
    assert [*map(load(look_up, arity=1), range(6))] == TABLE.tolist()
    sines = np.zeros(9, np.float32)
    load(write_sines, arity=3)(1, 9, sines.ctypes.data)
    angles = np.arange(9.0)
    np.testing.assert_array_equal(sines, (np.sin(angles) * np.cos(angles)).astype(np.float32))
    filled = np.full(2000, 7)
    load(clear, arity=3)(3, 1999, filled.ctypes.data)
    assert filled.tolist() == [7, 7, 7, *[0] * 1996, 7]


QUICKLY_COMPILED = {Scheme.FLOAT32, Scheme.INT8}


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(
            scheme,
            marks=() if scheme in QUICKLY_COMPILED else pytest.mark.all,
            id=scheme.value,
        )
        for scheme in PACKED_SCHEMES
    ],
)
def test_products_have_the_same_bits(
    load: Callable[..., Callable[..., int]], scheme: Scheme
) -> None:
    matrix = pack_matrix(make_random_numbers(1, 80, 200), scheme)
    prepared = quantise_rows(make_random_numbers(2, 7, 200), scheme)
    count = np.array([7], np.int64)
    found = []
    product = make_product(scheme)
    for call in (load(product, arity=3), compile_with_numba(product)):
        out = np.zeros((7, 5 * LANES), np.float32)
        arguments = gemm_arguments(matrix=matrix, rows=prepared, out=out, tokens=count)
        call(0, gemm_items(matrix), arguments.ctypes.data)
        found.append(out)
    assert found[0].any()
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def emit_object(text: str, *, model: str = "large") -> bytes:
    """The object file of LLVM code whose entry point has no arguments."""
    compiler._create_target_machine()  # initialises LLVM
    machine = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        reloc="static", codemodel=model
    )
    return bytes(machine.emit_object(binding.parse_assembly(text)))


ENTRY = "define i64 @entry() {{ {} }}"
CALL = "%found = call i64 @{0}() ret i64 %found"
LOAD = "%found = load i64, ptr @{0} ret i64 %found"


@LINUX_X86
def test_whoever_calls_the_c_library_finds_its_functions() -> None:
    text = ENTRY.format(CALL.format("getpid")) + " declare i64 @getpid()"
    image = make_image(emit_object(text))
    assert [name for _, name in image.functions] == ["getpid"]
    assert CodeImage.from_bytes(image.to_bytes()).to_bytes() == image.to_bytes()


@LINUX_X86
@pytest.mark.parametrize(
    ("text", "model", "problem"),
    [
        (
            ENTRY.format(CALL.format("no_such")) + " declare i64 @no_such()",
            "large",
            "the C library has no 'no_such'",
        ),
        (
            ENTRY.format(LOAD.format("number")) + " @number = global i64 3",
            "large",
            "a section is writable",
        ),
        (
            ENTRY.format(LOAD.format("number")) + " @number = global i64 0",
            "large",
            "a section has no content",
        ),
        (
            ENTRY.format(CALL.format("getpid")) + " declare i64 @getpid()",
            "small",
            "a relocation is not an address",
        ),
    ],
    ids=["unknown", "writable", "zeros", "relative"],
)
def test_what_has_no_image_is_refused(text: str, model: str, problem: str) -> None:
    with pytest.raises(UnsupportedObjectError, match=problem):
        make_image(emit_object(text, model=model))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (b"", "no ELF file"),
        (b"\x7fELF\x01\x01" + bytes(100), "no ELF file"),
        (b"\x7fELF\x02\x01" + bytes(100), "no object file for x86-64"),
    ],
    ids=["nothing", "32 bits", "another machine"],
)
def test_files_of_other_machines_have_no_image(code: bytes, problem: str) -> None:
    with pytest.raises(UnsupportedObjectError, match=problem):
        make_image(code)


def test_code_that_has_no_image_is_an_object_file() -> None:
    code = make_object(add_six, 6)
    assert not code.startswith(b"image")
    assert load_code(code, arity=6).call(1, 0, 0, 0, 0, 0) == 1


def test_compiled_code_may_not_call_what_only_numba_finds() -> None:
    only_here = types.ExternalFunction("only_here", types.int64())
    binding.add_symbol("only_here", module.find_library_function("getpid"))

    def call(number: int) -> int:  # pragma: no cover (compiled)
        return number + only_here()  # type: ignore[no-any-return]

    with pytest.raises(AssertionError, match="calls only_here"):
        compile_function(call, arity=1)


def test_compiled_code_may_not_raise() -> None:
    def refuse(number: int) -> int:  # pragma: no cover (compiled)
        if number > 3:
            raise ValueError
        return number

    with pytest.raises(AssertionError, match="raises"):
        compile_function(refuse, arity=1)


def test_a_division_by_zero_is_no_error(load: Callable[..., Callable[..., int]]) -> None:
    def divide(a: int, b: int) -> int:  # pragma: no cover (compiled)
        return a // b

    def divide_floats(first: int, last: int, address: int) -> None:  # pragma: no cover (compiled)
        out = float32_view(address, last)
        for k in range(first, last):
            out[k] = out[k] / np.float32(0)

    call = load(divide, arity=2)
    assert [call(7, 2), call(-7, 2), call(7, 0)] == [3, -4, 0]
    numbers = np.array([1, -1, 0], np.float32)
    load(divide_floats, arity=3)(0, 3, numbers.ctypes.data)
    np.testing.assert_array_equal(numbers, [np.inf, -np.inf, np.nan])


@LINUX_X86
def test_a_system_that_refuses_memory_or_its_execution_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KernelsUnavailableError, match="Invalid argument"):
        load_code(CodeImage(0, [], [], b"").to_bytes(), arity=0)
    code = compile_function(add_six, arity=6)
    monkeypatch.setattr(mmap, "PROT_EXEC", 1 << 20)
    with pytest.raises(KernelsUnavailableError, match="may not run compiled kernels"):
        load_code(code, arity=6)


CPU_INFO = """processor\t: {number}
model name\t: Example 9000
cpu MHz\t\t: {speed}
flags\t\t: fpu {flags}

processor\t: 7
model name\t: Another
"""


def test_a_processor_is_known_by_its_kind_and_what_it_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identify(**fields: Any) -> str:
        path = tmp_path / "cpuinfo"
        path.write_text(CPU_INFO.format(**fields), encoding="utf-8")
        monkeypatch.setattr(module, "_CPU_INFO", path)
        return identify_processor()

    first = identify(number=0, speed=2596.1, flags="avx2")
    assert first == identify(number=1, speed=3000.0, flags="avx2")
    assert first != identify(number=0, speed=2596.1, flags="avx2 avx512f")
    assert cpu_model_name() == "Example 9000"


def test_where_linux_does_not_list_processors_llvm_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "none")
    found = identify_processor().splitlines()
    assert found[:2] == [platform.machine(), binding.get_host_cpu_name()]
    assert cpu_model_name()
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(KernelsUnavailableError, match="without LLVM"):
        identify_processor()
