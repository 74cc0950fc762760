"""Compiling functions of int64s to machine code, and the processor that they are compiled for.

numba compiles a function to LLVM code. An entry point with a plain C signature is added, everything
else becomes internal, and what only numba calls is dropped. So machine code needs nothing but the C
library, and two functions of the same name have nothing to do with each other.

Compiled functions neither allocate nor raise: nothing in machine code could handle an exception.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.codegen import get_host_cpu_features

from expertctl.engine.kernels.compiled.object_file import UnsupportedObjectError, make_image
from expertctl.engine.kernels.machine_code import ENTRY_POINT

KernelFunction = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The instruction sets and register width of a processor, as far as kernels depend on them.

    All other code uses generic vectors of sixteen lanes, which LLVM lowers to the available
    instructions.
    """

    name: str
    bf16_dot: bool
    """``vdpbf16ps``: thirty-two bfloat16 products summed to sixteen float32."""
    byte_dot: bool
    """``vpdpbusd``: sixty-four byte products summed to sixteen int32."""
    short_dot: bool
    """``vpmaddwd``: sixteen int16 products summed to eight int32, and the same for bytes."""
    has_512_bit_registers: bool
    """Thirty-two registers of 64 bytes."""
    has_float16: bool
    """Conversion between float32 and float16."""

    def without_dot_instructions(self) -> "CpuFeatures":
        """Return these features without the dot-product instructions."""
        return replace(self, bf16_dot=False, byte_dot=False, short_dot=False)


@cache
def get_host_cpu() -> CpuFeatures:
    """Return the processor that numba compiles for: this machine's, or the configured one."""
    features = frozenset(_list_features())
    wide = {"avx512f", "avx512bw", "avx512vl"} <= features
    return CpuFeatures(
        name=_get_cpu_name(),
        bf16_dot=wide and "avx512bf16" in features,
        byte_dot=wide and "avx512vnni" in features,
        short_dot="avx2" in features,
        has_512_bit_registers=wide,
        has_float16=_supports_float16(features, platform.machine().lower()),
    )


def _get_cpu_name() -> str:
    return str(numba.config.CPU_NAME or binding.get_host_cpu_name())


def _get_feature_text() -> str:
    """Return LLVM's list of features: if ``NUMBA_CPU_FEATURES`` is set, only those it names."""
    features = numba.config.CPU_FEATURES
    return str(get_host_cpu_features() if features is None else features)


def _list_features() -> Iterator[str]:
    there: dict[str, bool] = {}
    for feature in filter(None, (each.strip() for each in _get_feature_text().split(","))):
        there[feature.lstrip("+-")] = not feature.startswith("-")
    return (name for name, has in there.items() if has)


def _supports_float16(features: frozenset[str], machine: str) -> bool:
    """Return whether float16 is native: always on AArch64, elsewhere if the features include it.

    Where it is not, the conversion with integers gives the same results.
    """
    if machine in {"aarch64", "arm64"}:
        return True
    return "avx512f" in features or {"avx", "f16c"} <= features


def compile_function(function: Callable[..., object], *, arity: int) -> bytes:
    """Return the code of a function of ``arity`` int64s that returns int64 or nothing.

    It is an image if possible, else an object file; its entry point always returns int64. A
    division by zero is not an error: of floats it is infinite or NaN, of integers it is 0.
    """
    result = types.int64 if function.__annotations__["return"] is int else types.void
    compiled = numba.cfunc(result(*[types.int64] * arity), error_model="numpy")(function)
    module = binding.parse_assembly(compiled.inspect_llvm())
    native = compiled.native_name.removeprefix("cfunc.")
    arguments = list(module.get_function(native).arguments)
    assert len(arguments) == 2 + arity, "numba passes a place for the result, and one for errors"
    module.link_in(binding.parse_assembly(_make_entry_point(native, arity)))
    _remove_unused_code(module)
    _check_code(module)
    code = bytes(_create_target_machine().emit_object(module))
    try:
        return make_image(code).to_bytes()
    except UnsupportedObjectError:
        return code


def _make_entry_point(native: str, arity: int) -> str:
    """Return LLVM code that calls a function of numba, which returns whether it raised."""
    arguments = ", ".join(f"i64 %argument{number}" for number in range(arity))
    return f"""
        declare i32 @"{native}"(ptr, ptr, {arguments})

        define i64 @{ENTRY_POINT}({arguments}) {{
            %result = alloca i64
            %error = alloca ptr
            store i64 0, ptr %result
            %raised = call i32 @"{native}"(ptr %result, ptr %error, {arguments})
            %returned = load i64, ptr %result
            ret i64 %returned
        }}
    """


def _remove_unused_code(module: Any) -> None:
    """Remove what the entry point does not need, such as wrappers that call the interpreter."""
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != ENTRY_POINT:
            each.linkage = "internal"
    options = binding.create_pipeline_tuning_options(speed_level=0)
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(_create_target_machine(), options))


def _check_code(module: Any) -> None:
    """Check that the code raises nothing, and calls nothing that only numba would provide."""
    raised = [each.name for each in module.global_variables if ".picklebuf." in each.name]
    assert not raised, "compiled code raises an exception"
    library = ctypes.CDLL(None)
    called = (each.name for each in module.functions if each.is_declaration)
    missing = [
        name for name in called if not name.startswith("llvm.") and not hasattr(library, name)
    ]
    assert not missing, f"compiled code calls {', '.join(missing)}"


@cache
def _create_target_machine() -> Any:
    """Return LLVM's description of the target, as numba sets it up to compile in a process."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=_get_cpu_name(),
        features=_get_feature_text(),
        opt=int(numba.config.OPT),
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
