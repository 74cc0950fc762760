"""The tensors of a base, read from its safetensors files without torch.

The required tensors follow from the configuration (`ModelConfig.tensor_shapes`) and are checked
from the headers alone, both for identifying and for loading a base.

Modules of layers with routed experts have one canonical name. Mixtral and libraries that adapt it
write ``block_sparse_moe.experts.3.w1`` for ``mlp.experts.3.gate_proj``, and some architectures
``mlp.shared_experts`` for ``mlp.shared_expert``, or ``mlp.router`` for ``mlp.gate``. Files store
the matrices of experts separately or stacked by layer; in either layout, each matrix of each expert
becomes a tensor of its own, a range of rows of the stored one. So the digest of a base, its loading
and reading single experts do not depend on the layout.

The folder of a GGUF base has `gguf_codec.GGUF_TABLE`, a table of its tensors by canonical name, in
place of weights.
"""

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.gguf_codec import GGUF_TABLE, find_gguf_file, read_gguf_table
from expertctl.package.model_config import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    ModelConfig,
    read_model_config,
)
from expertctl.package.quantisation_config import (
    MatrixQuantisation,
    Mxfp4Config,
    read_quantisation_config,
)
from expertctl.package.stored_layout import SourceRows, StoredNames, find_stored_rows, unwrap_name
from expertctl.package.stored_tensor import FileState, StoredTensor
from expertctl.package.tensor_file import BASE_LIMITS, TensorInfo, read_table
from expertctl.schema.strict_json import load_object

_MODULE = re.compile(r"(?P<layer>model\.layers\.[0-9]+)\.(?:block_sparse_moe|mlp)\.(?P<rest>.+)")
_HALF = re.compile(r"(?P<expert>experts\.[0-9]+)\.(?P<half>w[123])(?P<end>\..*)?")
_HALVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_RENAMED = re.compile(r"(?P<shared>shared_experts)(?=\.)|^router(?=\.|$)")
_ROUTER = re.compile(r"(?P<layer>model\.layers\.[0-9]+)\.mlp\.gate")


def canonicalise_name(name: str) -> str:
    """Return the canonical name of a module or tensor; most names are canonical already."""
    name = unwrap_name(name)
    match = _MODULE.fullmatch(name)
    if match is None:
        return name
    rest = _RENAMED.sub(
        lambda found: "shared_expert" if found["shared"] else "gate", match["rest"], count=1
    )
    half = _HALF.fullmatch(rest)
    if half is not None:
        rest = f"{half['expert']}.{_HALVES[half['half']]}{half['end'] or ''}"
    return f"{match['layer']}.mlp.{rest}"


def find_base_name(module: str, known: Container[str]) -> str:
    """Return the base's name of a module that an adapter changes; exact names take precedence."""
    return module if module in known else canonicalise_name(module)


def explain_absent_module(module: str, known: Container[str]) -> str:
    """Return why an adapter may not change a module that is not a linear layer of the base."""
    match = _ROUTER.fullmatch(canonicalise_name(module))
    if match is not None and f"{match['layer']}.mlp.experts.0.gate_proj" in known:
        return "it chooses the experts of its layer, and no adapter may change that"
    return "the base has no such linear layer"


_STACK = re.compile(
    r"(?P<experts>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.mlp\.experts)"
    r"\.(?P<kind>gate_up|down)_proj"
)
_LAYOUT_PATTERNS = {
    "stacked": re.compile(r".*\.experts\.(gate_up_proj|down_proj)"),
    "as w1, w2 and w3": re.compile(r".*\.experts\.[0-9]+\.w[123]\.weight"),
    "separately": re.compile(r".*\.experts\.[0-9]+\.(gate|up|down)_proj\.weight"),
}


def find_canonical_sources(
    infos: Mapping[str, TensorInfo], experts: ExpertsConfig, *, hidden: int, problems: list[str]
) -> dict[str, SourceRows]:
    """Return the source of every tensor by canonical name; add contradictions to ``problems``."""
    problems += _find_mixed_layouts(infos)
    sources: dict[str, SourceRows] = {}
    for stored, info in infos.items():
        for name, source in _slice_stack(stored, info, experts, hidden, problems):
            if name in sources:
                problems.append(
                    f"{name}: stored both as {sources[name].stored_name} and as {stored}"
                )
            sources[name] = source
    return sources


def _find_mixed_layouts(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Report experts stored in several layouts, as some would be stored twice."""
    firsts = {
        way: next((name for name in infos if pattern.fullmatch(name)), None)
        for way, pattern in _LAYOUT_PATTERNS.items()
    }
    found = [f"{way} ({first})" for way, first in firsts.items() if first is not None]
    return (
        [f"experts are stored {' and '.join(found)}; one layout is required"] if found[1:] else []
    )


def _slice_stack(
    stored: str, info: TensorInfo, experts: ExpertsConfig, hidden: int, problems: list[str]
) -> Iterator[tuple[str, SourceRows]]:
    name = canonicalise_name(stored)
    match = _STACK.fullmatch(name)
    if match is None or int(match["layer"]) not in experts.layers:
        yield name, SourceRows(stored, 0, info)  # also the stack of a nonexistent layer
        return
    inner = experts.intermediate_size
    halves = {"gate_proj": inner, "up_proj": inner} if match["kind"] == "gate_up" else {}
    rows, columns = (halves, hidden) if halves else ({"down_proj": hidden}, inner)
    wanted = (experts.count, sum(rows.values()), columns)
    if info.shape != wanted:
        problems.append(f"tensor {stored} is {list(info.shape)}, {list(wanted)} by config.json")
        return
    row_bytes = (info.end - info.begin) // (wanted[0] * wanted[1])
    first = 0
    for number in range(experts.count):
        for module, count in rows.items():
            begin = info.begin + first * row_bytes
            part = TensorInfo(info.dtype, (count, columns), begin, begin + count * row_bytes)
            yield f"{match['experts']}.{number}.{module}.weight", SourceRows(stored, first, part)
            first += count


WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_SHOWN_NAMES = 20
_DTYPES = ("F32", "F16", "BF16")
_MASK_DTYPES = ("BOOL", "U8")
"""The dtypes of attention masks, which older files store as buffers."""
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # in old files; follows from the configuration
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_base_tensors(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return every tensor that a configuration requires, and a tied head if it is stored, too.

    Names are canonical, whatever the names and the layout in the files.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when a file or the index is malformed, or when tensors are missing,
            unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float.
    """
    is_gguf = (directory / GGUF_TABLE).is_file()
    found = read_gguf_table(directory) if is_gguf else _read_tables(directory)
    problems: list[str] = []
    tensors = _select_text_part(found, config.stored_places.names, problems)
    quantisation = read_quantisation_config(directory)
    has_columns = config.stored_places.names.experts_as_columns
    if isinstance(quantisation, Mxfp4Config):
        _require_columns(directory, config)
    elif quantisation is not None:
        _require_whole_matrices(directory, config)
        tensors = _combine_quantised(tensors, config, quantisation, problems)
    if is_gguf:
        pass  # the names in the table are canonical
    elif config.experts is not None and has_columns:
        from expertctl.package.expert_columns import slice_column_stacks  # which needs numpy

        tensors = slice_column_stacks(
            tensors,
            config.experts,
            hidden=config.hidden_size,
            is_mxfp4=quantisation is not None,
            rename=canonicalise_name,
            problems=problems,
        )
    elif config.experts is not None:
        tensors = _canonicalise(tensors, config, config.experts, problems)
    if not (is_gguf or has_columns or config.stored_places.are_usual):
        tensors = _arrange(tensors, config, problems)
    problems = problems[:_MAX_SHOWN_NAMES] or _find_tensor_problems(tensors, config)
    if problems:
        raise InvalidPackageError(str(directory), problems)
    _require_floats(directory, tensors)
    return tensors


def list_unread_parts(directory: Path) -> tuple[str, ...]:
    """Return what a text needs no tensor of: prefixes of names in the files of a base.

    Raises as `read_model_config` and `read_base_tensors`.
    """
    parts = read_model_config(directory).stored_places.names.other_parts
    if not parts or (directory / GGUF_TABLE).is_file():
        return ()
    names = _read_tables(directory)
    return tuple(part for part in parts if any(name.startswith(part) for name in names))


def _select_text_part(
    found: Mapping[str, StoredTensor], names: StoredNames, problems: list[str]
) -> dict[str, StoredTensor]:
    """Return the tensors of a decoder; those for images and drafts are left out."""
    tensors: dict[str, StoredTensor] = {}
    for stored, tensor in found.items():
        if stored.endswith(_DERIVED_SUFFIX) or stored.startswith(names.other_parts):
            continue
        name = unwrap_name(stored) if names.other_parts else stored
        if name in tensors:
            problems.append(f"{name}: stored both as {tensors[name].stored} and as {stored}")
        tensors[name] = tensor
    return tensors


def read_storages(directory: Path, config: ModelConfig) -> dict[str, str]:
    """Return what each matrix of a base is stored as, by name; raises as `read_base_tensors`."""
    tensors = read_base_tensors(directory, config)
    return {n: tensor.storage for n, tensor in tensors.items() if len(tensor.info.shape) == 2}


def read_foreign_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a foreign base, sorted by name; raises as `read_base_tensors`."""
    if (directory / GGUF_TABLE).is_file():
        raise IncompatibleError(
            f"{find_gguf_file(directory)}: transformers does not run a GGUF base here",
            hint="leave out `--engine transformers`, or use the model's folder with safetensors",
        )
    found = _read_tables(directory)
    tensors = {name: found[name] for name in sorted(found) if not name.endswith(_DERIVED_SUFFIX)}
    weights = {n: t for n, t in tensors.items() if not _is_mask(n, t)}
    _require_floats(directory, weights)
    return tensors


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a base, as listed in its index, or its GGUF file.

    Raises:
        NotFoundError: when there is none, or one of them is missing.
        InvalidPackageError: when the index is malformed.
    """
    if (directory / GGUF_TABLE).is_file():
        return [find_gguf_file(directory)]
    if not (directory / INDEX_FILE).is_file():
        return [find_base_file(directory, WEIGHTS_FILE)]
    names = sorted(set(_read_weight_map(directory).values()))
    odd = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if odd:
        problems = [f"{name[:80]!r} is not the name of a safetensors file" for name in odd]
        raise InvalidPackageError(str(directory / INDEX_FILE), problems)
    return [find_base_file(directory, name) for name in names]


def find_base_file(directory: Path, name: str) -> Path:
    """Return the path of a required file of a base.

    Raises:
        NotFoundError: when it is missing; the hint mentions pickles if there are any.
    """
    path = directory / name
    if path.is_file():
        return path
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: no such directory", hint="name the one that config.json is in"
        )
    pickled = any(True for pattern in _PICKLES for _ in directory.glob(pattern))
    hint = "weights must be safetensors: pickles are never opened" if pickled else ""
    raise NotFoundError(f"{directory}: {name} is missing", hint=hint)


def _require_floats(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.info.dtype not in _DTYPES:
            raise IncompatibleError(
                f"{directory}: tensor {name} is {tensor.info.dtype}",
                hint="a base must be in float32, float16 or bfloat16, unless config.json has a "
                "quantization_config",
            )


def _is_mask(name: str, tensor: StoredTensor) -> bool:
    return tensor.info.dtype in _MASK_DTYPES and not name.endswith(".weight")


def _read_tables(directory: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for path in find_weight_files(directory):
        state = FileState.from_stat(path.stat())
        table = read_table(path, limits=BASE_LIMITS)
        for name, info in table.tensors.items():
            if name in tensors:
                problems.append(f"{name}: in {tensors[name].path.name} and in {path.name}")
            offset = table.data_offset + info.begin
            tensors[name] = StoredTensor(path, info, offset, name, file=state)
    problems += _find_index_problems(directory, tensors)
    if problems:
        raise InvalidPackageError(str(directory), problems[:_MAX_SHOWN_NAMES])
    return tensors


def _require_whole_matrices(directory: Path, config: ModelConfig) -> None:
    """Refuse quantised weights whose stored matrices are several of ours, or transposed."""
    names = config.stored_places.names
    fused = names.fused_qkv or names.fused_gate_up or config.stored_places.fused
    if fused or names.transposed or names.stacked_head_norms or names.experts_as_columns:
        raise IncompatibleError(
            f"{directory}: quantised weights of {config.architecture} are not supported",
            hint="use the base in float32, float16 or bfloat16",
        )


def _require_columns(directory: Path, config: ModelConfig) -> None:
    if not config.stored_places.names.experts_as_columns:
        raise IncompatibleError(
            f"{directory}: MXFP4 weights of {config.architecture} are not supported",
            hint="MXFP4 is read in bases of gpt_oss; use this one in float32, float16 or bfloat16",
        )


def _combine_quantised(
    found: Mapping[str, StoredTensor],
    config: ModelConfig,
    quantisation: MatrixQuantisation,
    problems: list[str],
) -> dict[str, StoredTensor]:
    from expertctl.package.quantised_weights import combine_parts  # which needs numpy

    shapes = config.tensor_shapes()
    shapes.setdefault(HEAD_TENSOR, shapes[EMBEDDING_TENSOR])
    if config.stored_places.are_usual:
        return combine_parts(
            found, quantisation, lambda name: shapes.get(canonicalise_name(name)), problems
        )
    places = config.stored_places
    theirs = {
        f"{places.find_stored_module(name.rpartition('.')[0])[0]}.{name.rpartition('.')[2]}": shape
        for name, shape in shapes.items()
    }
    return combine_parts(found, quantisation, theirs.get, problems)


def _canonicalise(
    found: Mapping[str, StoredTensor],
    config: ModelConfig,
    experts: ExpertsConfig,
    problems: list[str],
) -> dict[str, StoredTensor]:
    infos = {name: tensor.info for name, tensor in found.items()}
    sources = find_canonical_sources(infos, experts, hidden=config.hidden_size, problems=problems)
    return {
        name: _slice_tensor(found[source.stored_name], source) for name, source in sources.items()
    }


def _arrange(
    found: Mapping[str, StoredTensor], config: ModelConfig, problems: list[str]
) -> dict[str, StoredTensor]:
    """Return the tensors of files with the names and the layout of their architecture."""
    needed = config.tensor_shapes()
    sources = find_stored_rows(
        {name: tensor.info for name, tensor in found.items()},
        {**needed, HEAD_TENSOR: needed[EMBEDDING_TENSOR]},
        config.stored_places,
        optional=() if HEAD_TENSOR in needed else (HEAD_TENSOR,),
        problems=problems,
    )
    return {
        name: _slice_tensor(found[source.stored_name], source) for name, source in sources.items()
    }


def _slice_tensor(whole: StoredTensor, source: SourceRows) -> StoredTensor:
    if source.info.shape == whole.info.shape and source.layout is None:
        return whole
    if whole.codec is not None:
        assert (source.row, source.layout) == (0, None), "a codec decodes whole matrices"
        return whole
    offset = whole.offset + source.info.begin - whole.info.begin
    return StoredTensor(
        whole.path,
        source.info,
        offset,
        source.stored_name,
        source.row,
        whole.file,
        source.layout,
    )


def _find_tensor_problems(found: Mapping[str, StoredTensor], config: ModelConfig) -> list[str]:
    needed = config.tensor_shapes()
    wanted = {**needed, HEAD_TENSOR: needed[EMBEDDING_TENSOR]}  # a tied head may be stored as well
    problems = _format_listed("missing tensor", sorted(needed.keys() - found.keys()))
    problems += _format_listed("unexpected tensor", sorted(found.keys() - wanted.keys()))
    wrong = [
        f"{name} is {list(found[name].info.shape)}, {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in found and found[name].info.shape != shape
    ]
    return problems + _format_listed("tensor", wrong)


def _format_listed(what: str, names: list[str]) -> list[str]:
    lines = [f"{what} {name[:200]}" for name in names[:_MAX_SHOWN_NAMES]]
    return (
        [*lines, f"and {len(names) - _MAX_SHOWN_NAMES} more"]
        if len(names) > _MAX_SHOWN_NAMES
        else lines
    )


def _read_weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    index = load_object(path.read_bytes(), what=str(path), max_bytes=_MAX_INDEX_BYTES)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InvalidPackageError(str(path), ["there is no weight_map"])
    if not all(isinstance(file, str) for file in table.values()):
        raise InvalidPackageError(str(path), ["weight_map names something that is no file"])
    return {name: str(file) for name, file in table.items()}


def _find_index_problems(directory: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Check that the index lists exactly the tensors in the files."""
    if not (directory / INDEX_FILE).is_file():
        return []
    expected = _read_weight_map(directory)
    actual = {name: tensor.path.name for name, tensor in tensors.items()}
    wrong = sorted(n for n in {*expected, *actual} if expected.get(n) != actual.get(n))
    return [
        f"{n}: in {actual.get(n, 'no file')}, the index says {expected.get(n, 'nothing')}"
        for n in wrong
    ]
