"""How the weights of a Hugging Face base are quantised: ``quantization_config`` of ``config.json``.

Each library that quantises has a row here; its tensors are decoded in
`expertctl.package.quantised_weights`. Which modules are quantised follows from the tensors in the
files, so lists of skipped modules are not interpreted. Settings of a calibration, and of how the
library computes (such as ``bnb_4bit_compute_dtype``), have no effect on the stored weights.

Quantised *activations* (W8A8, FP8 with ``activation_scheme``, a quantised KV cache) are a choice
of the program that runs a base. Ours computes activations in a float type, more exactly, and the
scales of activations in the files are not used.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import ConfigFields
from expertctl.package.config_document import CONFIG_FILE, read_config_document
from expertctl.schema.strict_json import JsonObject, JsonValue

MAX_GROUP = 1 << 20
"""The most columns that may share a scale."""
_MAX_BLOCK = 1 << 16
_HINT = "use the base in float32, float16 or bfloat16, or quantised by {}"
_METHODS = ("bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class BitsandbytesConfig:
    """NF4 or FP4 in blocks, or INT8 with a scale for each row."""

    bits: Literal[4, 8]


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """Integers packed along the input, with scales and zero points of groups of the input."""

    bits: int
    group: int | None
    """The number of inputs that share a scale; None: all."""
    adds_one: bool
    """Whether stored zero points are one too low, as in version 1 of the format."""


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """4-bit integers packed along the output in an interleaved order (the layout *GEMM*)."""

    group: int | None


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Integers or FP8 by rows, as compressed-tensors stores them, perhaps packed."""

    bits: int
    is_packed: bool
    is_float: bool
    symmetric: bool
    group: int | None
    """The number of columns that share a scale; None: all."""
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """FP8 (E4M3) with a scale for each block of rows and columns, or one for the matrix."""

    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """MXFP4, only in stacks of routed experts; see `expertctl.package.expert_columns`."""


MatrixQuantisation = BitsandbytesConfig | GptqConfig | AwqConfig | CompressedConfig | Fp8Config
"""How single matrices are quantised."""
QuantisationConfig = MatrixQuantisation | Mxfp4Config


def read_quantisation_config(directory: Path) -> QuantisationConfig | None:
    """Read how the weights of a base are quantised; raises as `parse_quantisation_config`."""
    document = read_config_document(directory)
    return parse_quantisation_config(document, what=str(directory / CONFIG_FILE))


def parse_quantisation_config(document: JsonObject, *, what: str) -> QuantisationConfig | None:
    """Return how the weights of a base are quantised, by its ``config.json``; None: not at all.

    Raises:
        IncompatibleError: for a method, or a variant of it, that is not supported.
        InvalidPackageError: with all problems, when values are malformed or absurd.
    """
    outer = ConfigFields(document)
    names = ("quantization_config", "compression_config")
    used = next((name for name in names if outer.get(name) is not None), None)
    if used is None:
        return None
    fields = outer.read_nested(used)
    outer.raise_problems(what)
    config = _parse_method(fields, f"{what}: {used}")
    outer.raise_problems(what)
    return config


def _parse_method(fields: ConfigFields, what: str) -> QuantisationConfig:
    default = "bitsandbytes" if fields.get("load_in_4bit") or fields.get("load_in_8bit") else None
    match fields.read_text("quant_method", default=default):
        case "bitsandbytes" | "bitsandbytes_4bit" | "bitsandbytes_8bit":
            return _parse_bitsandbytes(fields, what)
        case "gptq":
            return _parse_gptq(fields, what)
        case "awq":
            return _parse_awq(fields, what)
        case "compressed-tensors":
            return _parse_compressed(fields, what)
        case "fp8":
            return _parse_fp8(fields, what)
        case "mxfp4":
            return Mxfp4Config()
        case other:
            fields.raise_problems(what)
            raise _make_refusal(what, f"the method {other[:40]!r}")


def _make_refusal(what: str, named: str) -> IncompatibleError:
    return IncompatibleError(
        f"{what}: {named} is not supported",
        hint=_HINT.format(f"{', '.join(_METHODS[:-1])} or {_METHODS[-1]}"),
    )


def _parse_bitsandbytes(fields: ConfigFields, what: str) -> BitsandbytesConfig:
    four = fields.read_boolean("load_in_4bit", default=False)
    eight = fields.read_boolean("load_in_8bit", default=False)
    if four == eight:
        fields.add_problem("load_in_4bit", "and load_in_8bit: exactly one must be true")
    kind = fields.read_text("bnb_4bit_quant_type", default="fp4")
    if four and kind not in ("nf4", "fp4"):
        raise _make_refusal(what, f"bnb_4bit_quant_type {kind[:40]!r}")
    return BitsandbytesConfig(4 if four else 8)


def _parse_gptq(fields: ConfigFields, what: str) -> GptqConfig:
    bits = fields.read_integer("bits", minimum=1, maximum=32)
    _require(fields, what, "bits", bits, (2, 3, 4, 8))
    key = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    form = fields.read_text(key, default="gptq").lower()
    _require(fields, what, key, form, ("gptq", "gptq_v2"))
    packed = fields.read_text("pack_dtype", default="int32")
    _require(fields, what, "pack_dtype", packed, ("int32", "torch.int32"))
    return GptqConfig(bits, _parse_group(fields), form == "gptq")


def _parse_awq(fields: ConfigFields, what: str) -> AwqConfig:
    bits = fields.read_integer("bits", minimum=1, maximum=32, default=4)
    _require(fields, what, "bits", bits, (4,))
    key = "version" if fields.get("version") is not None else "format"
    _require(fields, what, key, fields.read_text(key, default="gemm").lower(), ("gemm",))
    _require(fields, what, "zero_point", fields.read_boolean("zero_point", default=True), (True,))
    return AwqConfig(_parse_group(fields))


def _require(
    fields: ConfigFields, what: str, name: str, value: JsonValue, allowed: tuple[JsonValue, ...]
) -> None:
    fields.raise_problems(what)
    if value not in allowed:
        raise _make_refusal(what, f"{name} {str(value)[:40]!r}")


def _parse_group(fields: ConfigFields) -> int | None:
    name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    size = fields.read_integer(name, minimum=-1, maximum=MAX_GROUP, default=128)
    if size == 0:
        fields.add_problem(name, "is 0")
    return size if size > 0 else None


def _parse_fp8(fields: ConfigFields, what: str) -> Fp8Config:
    form = fields.read_text("fmt", default="e4m3")
    _require(fields, what, "fmt", form, ("e4m3", "float8_e4m3fn"))
    experts = fields.read_text("expert_dtype", default="fp8")
    _require(fields, what, "expert_dtype", experts, ("fp8",))
    return Fp8Config(_parse_block(fields, "weight_block_size"))


def _parse_block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block, of ``[128, 128]`` or ``"128x128"``."""
    value = fields.get(name)
    if value is None:
        return None
    parts = value.split("x") if isinstance(value, str) else value
    sizes = [_parse_size(part) for part in parts] if isinstance(parts, list) else []
    if len(sizes) != 2 or None in sizes:
        fields.add_problem(name, f"is not two sizes from 1 to {_MAX_BLOCK}")
        return None
    rows, columns = (size or 1 for size in sizes)
    return rows, columns


def _parse_size(value: JsonValue) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6:
        value = int(value)
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_BLOCK
    return value if isinstance(value, int) and valid else None


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


def _parse_compressed(fields: ConfigFields, what: str) -> CompressedConfig:
    for name in ("sparsity_config", "transform_config"):
        if fields.get(name) and fields.read_nested(name).get("format") != "dense":
            raise _make_refusal(what, name)
    stated = fields.read_text("format", default="dense")
    groups = fields.read_nested("config_groups")
    schemes = [
        _parse_scheme(groups.read_nested(name), stated, f"{what}.config_groups.{name[:40]}")
        for name in groups.values
    ]
    fields.raise_problems(what)
    if not schemes:
        fields.add_problem("config_groups", "names no scheme")
        fields.raise_problems(what)
    if any(scheme != schemes[0] for scheme in schemes):
        raise _make_refusal(what, "more than one scheme in config_groups")
    return schemes[0]


def _parse_scheme(group: ConfigFields, stated: str, what: str) -> CompressedConfig:
    form = group.read_text("format", default=stated)
    _require(group, what, "format", form, _FORMATS)
    weights = group.read_nested("weights")
    kind = weights.read_text("type", default="int").lower()
    bits = weights.read_integer("num_bits", minimum=1, maximum=32, default=8)
    is_packed, is_float = form == "pack-quantized", kind == "float"
    widths = tuple(range(1, 9)) if is_packed else (8,)
    _require(weights, what, "num_bits", bits, widths)
    kinds = {"naive-quantized": ("int", "float"), "float-quantized": ("float",)}.get(form, ("int",))
    _require(weights, what, "type", kind, kinds)
    size = weights.read_integer("group_size", minimum=-1, maximum=MAX_GROUP, default=-1)
    default = "group" if size > 0 else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = weights.read_text("strategy", default=default).lower()
    _require(weights, what, "strategy", strategy, _STRATEGIES)
    block = _parse_block(weights, "block_structure") if strategy == "block" else None
    if strategy == "group" and size < 1:
        weights.add_problem("group_size", f"is {size}, a group needs a size")
    if strategy == "block" and (block is None or is_packed):
        weights.add_problem("block_structure", "does not fit strategy and format")
    return CompressedConfig(
        bits=bits,
        is_packed=is_packed,
        is_float=is_float,
        symmetric=weights.read_boolean("symmetric", default=True),
        group=size if strategy == "group" else None,
        block=block,
    )
