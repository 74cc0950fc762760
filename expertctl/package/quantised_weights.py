"""Which stored tensors make up a quantised weight: they are checked and become one with a codec.

Where the files have the parts of a method for ``X.weight``, they replace it; everything else stays.
Dtypes and shapes of all parts follow from ``config.json``, and are checked before any is used.
Scales of activations are left out, see `expertctl.package.quantisation_config`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from expertctl.errors import InvalidPackageError
from expertctl.package.architectures import ConfigFields
from expertctl.package.quantisation_config import (
    AwqConfig,
    BitsandbytesConfig,
    CompressedConfig,
    Fp8Config,
    GptqConfig,
    MatrixQuantisation,
)
from expertctl.package.quantised_codecs import (
    BlockFloatCodec,
    ColumnReader,
    FloatName,
    OuterAbsmax,
    ScaledColumnsCodec,
    ScaledRowsCodec,
)
from expertctl.package.stored_tensor import StoredTensor
from expertctl.package.tensor_file import TensorInfo
from expertctl.schema.strict_json import load_object

FindShape = Callable[[str], tuple[int, ...] | None]
"""Returns the shape of a tensor by the name in the files; None if the base has no such tensor."""
Shape = tuple[int, ...]
QuantisedCodec = BlockFloatCodec | ScaledRowsCodec | ScaledColumnsCodec

_FLOATS = ("F32", "F16", "BF16")
_FLOAT_NAMES: Mapping[str, FloatName] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STATE = ".weight.quant_state.bitsandbytes__"
_UNUSED_SUFFIXES = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale"),
)
"""Scales of activations and of a KV cache."""
_MAX_STATE_BYTES = 4096
_MAX_BIAS_BYTES = 1 << 20
_WORD_BITS = 32


class _PartError(Exception):
    """A part is missing, or of another dtype or shape than the configuration says."""


class _Module:
    """The parts of one linear layer; records which of them are used."""

    def __init__(self, name: str, shape: Shape, found: Mapping[str, StoredTensor]) -> None:
        self.name, self._found = name, found
        self.out, self.into = shape
        self.used: set[str] = set()

    def take(self, suffix: str, dtypes: tuple[str, ...], *shapes: Shape) -> StoredTensor:
        """Return a part with one of the dtypes and shapes; no shape: any."""
        part = self.take_any(suffix)
        if part is None:
            raise _PartError(f"missing tensor {self.name}{suffix}")
        if part.info.dtype not in dtypes or (shapes and part.info.shape not in shapes):
            wanted = " or ".join(str(list(shape)) for shape in shapes) or "any shape"
            raise _PartError(
                f"tensor {self.name}{suffix} is {part.info.dtype} {list(part.info.shape)}, by "
                f"config.json {' or '.join(dtypes)} {wanted}"
            )
        return part

    def take_any(self, suffix: str) -> StoredTensor | None:
        """Return a part that need not exist."""
        self.used.add(f"{self.name}{suffix}")
        return self._found.get(f"{self.name}{suffix}")

    def has(self, suffix: str) -> bool:
        """Return whether a part exists."""
        return f"{self.name}{suffix}" in self._found


def combine_parts(
    found: Mapping[str, StoredTensor],
    config: MatrixQuantisation,
    find_shape: FindShape,
    problems: list[str],
) -> dict[str, StoredTensor]:
    """Return the tensors of a base with quantised weights by their names in the files.

    What is wrong with parts is added to ``problems``.

    Raises:
        InvalidPackageError: when a file changed, or is cut short.
    """
    reader, combined, used = ColumnReader(), dict[str, StoredTensor](), set[str]()
    for name in _iter_modules(found, config):
        shape = find_shape(f"{name}.weight")
        if shape is None or len(shape) != 2:
            continue  # its parts are reported as unexpected
        module = _Module(name, shape, found)
        try:
            codec = _make_codec(module, config, reader)
        except _PartError as error:
            problems.append(str(error))
        else:
            first = codec.parts[0]
            info, weight = TensorInfo("F32", shape, 0, 0), f"{name}.weight"
            combined[weight] = StoredTensor(
                first.path,
                info,
                0,
                weight,
                file=first.file,
                codec=codec,
                decoded=None if codec.dtype == "F32" else codec.dtype,
            )
            if find_shape(f"{name}.bias") is None and _is_zero(found.get(f"{name}.bias")):
                used.add(f"{name}.bias")  # AutoGPTQ writes one for every layer
        used |= module.used
    if not combined and not problems:
        problems.append("config.json says that the weights are quantised, but none is")
    rest = {n: t for n, t in found.items() if n not in used and not n.endswith(_UNUSED_SUFFIXES)}
    return {**rest, **combined}


def _iter_modules(found: Mapping[str, StoredTensor], config: MatrixQuantisation) -> Iterator[str]:
    """Yield the modules with a part that only quantised ones have."""
    ends: tuple[str, ...]
    match config:
        case BitsandbytesConfig(bits=4):
            ends = (f"{_STATE}nf4", f"{_STATE}fp4")
        case BitsandbytesConfig():
            ends = (".SCB",)
        case GptqConfig() | AwqConfig():
            ends = (".qweight",)
        case CompressedConfig(is_packed=True):
            ends = (".weight_packed",)
        case CompressedConfig():
            ends = (".weight_scale",)
        case Fp8Config():
            ends = (".weight_scale_inv", ".weight_scale")
    seen = {name.removesuffix(end) for name in found for end in ends if name.endswith(end)}
    yield from sorted(seen)


def _make_codec(
    module: _Module, config: MatrixQuantisation, reader: ColumnReader
) -> QuantisedCodec:
    match config:
        case BitsandbytesConfig(bits=4):
            return _make_block_codec(module)
        case BitsandbytesConfig():
            return _make_int8_codec(module)
        case GptqConfig():
            return _make_gptq_codec(module, config, reader)
        case AwqConfig():
            return _make_awq_codec(module, config, reader)
        case CompressedConfig():
            return _make_compressed_codec(module, config)
        case Fp8Config():
            return _make_fp8_codec(module, config)


def _make_block_codec(module: _Module) -> BlockFloatCodec:
    kind: Literal["nf4", "fp4"] = "nf4" if module.has(f"{_STATE}nf4") else "fp4"
    state = module.take(f"{_STATE}{kind}", ("U8",))
    fields = _read_state(state)
    blocksize = _read_blocksize(fields, "blocksize")
    dtype = _read_float_name(fields)
    nested = _read_nested(fields) if module.has(".weight.nested_absmax") else None
    if fields.get("quant_type") != kind:
        fields.add_problem("quant_type", f"is not {kind}")
    if fields.get("shape") != [module.out, module.into]:
        fields.add_problem("shape", f"is not {[module.out, module.into]}, as by config.json")
    if fields.problems:
        raise _PartError(f"tensor {state.stored}: {'; '.join(fields.problems)}")
    count = module.out * module.into
    size, blocks = -(-count // 2), -(-count // blocksize)
    outer = None if nested is None else _take_outer(module, *nested, blocks=blocks)
    codes = module.take(".weight", ("U8", *_FLOATS))
    if codes.size != size:
        raise _PartError(f"tensor {codes.stored} has {codes.size} bytes, {size} by config.json")
    module.take_any(".weight.quant_map")
    kinds = ("F32",) if outer is None else ("U8",)
    absmax = module.take(".weight.absmax", kinds, (blocks,))
    return BlockFloatCodec(kind, codes, absmax, state, module.into, blocksize, dtype, outer)


def _take_outer(module: _Module, blocksize: int, offset: float, *, blocks: int) -> OuterAbsmax:
    absmax = module.take(".weight.nested_absmax", ("F32",), (-(-blocks // blocksize),))
    table = module.take(".weight.nested_quant_map", ("F32",), (256,))
    return OuterAbsmax(absmax, table, blocksize, offset)


def _read_nested(fields: ConfigFields) -> tuple[int, float]:
    """Return the blocksize and the offset of double quantisation."""
    if fields.read_text("nested_dtype", default="float32") != "float32":
        fields.add_problem("nested_dtype", "is not float32")
    offset = fields.read_number("nested_offset", minimum=-1e30, maximum=1e30)
    return _read_blocksize(fields, "nested_blocksize"), offset


def _read_float_name(fields: ConfigFields) -> FloatName:
    name = _FLOAT_NAMES.get(fields.read_text("dtype"))
    if name is None:
        fields.add_problem("dtype", f"is not one of {', '.join(_FLOAT_NAMES)}")
    return name or "F32"


def _read_blocksize(fields: ConfigFields, name: str) -> int:
    size = fields.read_integer(name, minimum=1, maximum=_BLOCKSIZES[-1])
    if size not in _BLOCKSIZES:
        fields.add_problem(name, f"is not one of {', '.join(map(str, _BLOCKSIZES))}")
    return size


def _read_state(state: StoredTensor) -> ConfigFields:
    data = _read_small(state, _MAX_STATE_BYTES)
    try:
        values = load_object(data, what=state.stored, max_bytes=_MAX_STATE_BYTES)
    except InvalidPackageError as error:
        raise _PartError(f"tensor {state.stored}: {'; '.join(error.problems)}") from error
    return ConfigFields(values)


def _read_small(part: StoredTensor, max_bytes: int) -> bytes:
    if part.size > max_bytes:
        raise _PartError(f"tensor {part.stored} has {part.size} bytes, at most {max_bytes} allowed")
    try:
        with part.open() as stream:
            stream.seek(part.offset)
            return stream.read(part.size)
    except OSError as error:
        raise InvalidPackageError(str(part.path), [f"cannot be read: {error}"]) from error


def _is_zero(part: StoredTensor | None) -> bool:
    """Return whether a tensor is a small one of zeros."""
    return (
        part is not None
        and part.size <= _MAX_BIAS_BYTES
        and not any(_read_small(part, _MAX_BIAS_BYTES))
    )


def _make_int8_codec(module: _Module) -> ScaledRowsCodec:
    shape = (module.out, module.into)
    if module.has(".weight_format"):
        form = module.take(".weight_format", ("U8",), (), (1,))
        if _read_small(form, 1) != b"\0":
            raise _PartError(f"tensor {form.stored} says that the rows are in tiles: not supported")
    return ScaledRowsCodec(
        storage="INT8 (bitsandbytes)",
        codes=module.take(".weight", ("I8",), shape),
        coding="int8",
        bits=8,
        shape=shape,
        block=(1, module.into),
        scales=module.take(".SCB", ("F32",), (module.out,), (module.out, 1)),
        dtype="F32",
        step=True,
    )


def _make_gptq_codec(
    module: _Module, config: GptqConfig, reader: ColumnReader
) -> ScaledColumnsCodec:
    bits, group = config.bits, config.group or module.into
    groups = -(-module.into // group)
    words = (_count_words(module, module.into, bits), _count_words(module, module.out, bits))
    order = None
    if module.has(".g_idx"):
        order = module.take(".g_idx", ("I32",), (module.into,))
    version = "" if config.adds_one else " v2"
    return ScaledColumnsCodec(
        storage=f"GPTQ{version} int{bits}{_describe_group(config.group)}",
        layout="gptq",
        codes=module.take(".qweight", ("I32",), (words[0], module.out)),
        zeros=module.take(".qzeros", ("I32",), (groups, words[1])),
        scales=module.take(".scales", _FLOATS, (groups, module.out)),
        groups=order,
        columns=module.into,
        bits=bits,
        group=group,
        adds_one=config.adds_one,
        reader=reader,
    )


def _make_awq_codec(module: _Module, config: AwqConfig, reader: ColumnReader) -> ScaledColumnsCodec:
    group = config.group or module.into
    groups, words = -(-module.into // group), _count_words(module, module.out, 4)
    return ScaledColumnsCodec(
        storage=f"AWQ int4{_describe_group(config.group)}",
        layout="awq",
        codes=module.take(".qweight", ("I32",), (module.into, words)),
        zeros=module.take(".qzeros", ("I32",), (groups, words)),
        scales=module.take(".scales", _FLOATS, (groups, module.out)),
        groups=None,
        columns=module.into,
        bits=4,
        group=group,
        adds_one=False,
        reader=reader,
    )


def _describe_group(group: int | None) -> str:
    return "" if group is None else f" in groups of {group}"


def _describe_block(block: tuple[int, int] | None) -> str:
    return "" if block is None else f" in blocks of {block[0]}x{block[1]}"


def _count_words(module: _Module, count: int, bits: int) -> int:
    """Return the 32-bit words of packed codes that fill them."""
    if count * bits % _WORD_BITS:
        raise _PartError(f"{module.name}: {count} codes of {bits} bits do not fill 32-bit words")
    return count * bits // _WORD_BITS


def _make_compressed_codec(module: _Module, config: CompressedConfig) -> ScaledRowsCodec:
    shape = (module.out, module.into)
    if config.group is not None and module.into % config.group:
        raise _PartError(f"{module.name}: {module.into} columns are not groups of {config.group}")
    block = config.block or (1, config.group or module.into)
    scales, block = _take_scales(module, ".weight_scale", block)
    grid = (-(-module.out // block[0]), -(-module.into // block[1]))
    codes, coding, entry = _take_compressed_codes(module, config, shape)
    zeros = None
    if module.has(".weight_zero_point") and config.symmetric:
        module.take_any(".weight_zero_point")  # all zero, by the definition of symmetric
    elif not config.symmetric:
        zeros = _take_zeros(module, config, grid)
    order = None
    if module.has(".weight_g_idx"):
        order = module.take(".weight_g_idx", ("I32",), (module.into,))
    kind = "FP8" if config.is_float else f"int{config.bits}"
    sign = "" if config.symmetric else " with zero points"
    packed = ", packed" if config.is_packed else ""
    grouped = _describe_group(config.group) + _describe_block(config.block)
    return ScaledRowsCodec(
        storage=f"{kind}{sign}{grouped} (compressed-tensors{packed})",
        codes=codes,
        coding=coding,
        bits=config.bits,
        shape=shape,
        block=block,
        scales=scales,
        dtype=_FLOAT_TYPES[scales.info.dtype],
        zeros=zeros,
        groups=order,
        shape_entry=entry,
    )


_FLOAT_TYPES: Mapping[str, FloatName] = {name: name for name in _FLOAT_NAMES.values()}


def _take_compressed_codes(
    module: _Module, config: CompressedConfig, shape: tuple[int, int]
) -> tuple[StoredTensor, Literal["int8", "fp8", "packed"], StoredTensor | None]:
    if not config.is_packed:
        dtype = "F8_E4M3" if config.is_float else "I8"
        coding: Literal["int8", "fp8"] = "fp8" if config.is_float else "int8"
        return module.take(".weight", (dtype,), shape), coding, None
    entry = module.take(".weight_shape", ("I64", "I32"), (2,))
    width = entry.size // 2
    data = _read_small(entry, 16)
    stated = [int.from_bytes(data[n : n + width], "little", signed=True) for n in (0, width)]
    if stated != list(shape):
        raise _PartError(f"tensor {entry.stored} states {stated}, {list(shape)} by config.json")
    words = -(-module.into * config.bits // _WORD_BITS)
    codes = module.take(".weight_packed", ("I32",), (module.out, words))
    return codes, "packed", entry


def _take_zeros(module: _Module, config: CompressedConfig, grid: tuple[int, int]) -> StoredTensor:
    plain: tuple[Shape, ...] = (grid, grid[:1]) if grid[1] == 1 else (grid,)
    if grid == (1, 1):
        plain = (*plain, ())
    part = module.take(".weight_zero_point", ("I8", "I32"))
    if part.info.dtype == "I8":
        return module.take(".weight_zero_point", ("I8",), *plain)
    words = -(-grid[0] * config.bits // _WORD_BITS)
    if not config.is_packed:
        return module.take(".weight_zero_point", ("I8",), *plain)
    return module.take(".weight_zero_point", ("I32",), (words, grid[1]))


def _take_scales(
    module: _Module, suffix: str, block: tuple[int, int]
) -> tuple[StoredTensor, tuple[int, int]]:
    """Return the scales, and the rows and columns of a block: all, if there is only one scale."""
    rows, columns = -(-module.out // block[0]), -(-module.into // block[1])
    shapes: list[Shape] = [(rows, columns), (1,), ()]
    if columns == 1:
        shapes.append((rows,))
    part = module.take(suffix, _FLOATS, *shapes)
    single = part.info.shape in ((1,), (), (1, 1))
    return part, (module.out, module.into) if single else block


def _make_fp8_codec(module: _Module, config: Fp8Config) -> ScaledRowsCodec:
    shape = (module.out, module.into)
    suffix = ".weight_scale_inv" if module.has(".weight_scale_inv") else ".weight_scale"
    scales, block = _take_scales(module, suffix, config.block or (1, module.into))
    return ScaledRowsCodec(
        storage=f"FP8{_describe_block(config.block)}",
        codes=module.take(".weight", ("F8_E4M3",), shape),
        coding="fp8",
        bits=8,
        shape=shape,
        block=block,
        scales=scales,
        dtype="F32",
    )
