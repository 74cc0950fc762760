"""Where the tensors of our decoder are in the files of an architecture.

The decoder has one set of names (`ModelConfig.tensor_shapes`). Files have others: other prefixes,
other names in a layer, several projections in one matrix, or matrices as [in, out] (``Conv1D`` of
GPT-2). `find_stored_rows` says which rows of which stored tensors the tensors of the decoder are,
and `StoredPlaces.split_module` what the name of a stored module means, which adapters use.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from expertctl.package.tensor_file import TensorInfo

EMBEDDING = "model.embed_tokens"
POSITIONS = "model.embed_positions"
FINAL_NORM = "model.norm"
HEAD = "lm_head"
QKV_MODULE = "self_attn.qkv_proj"
GATE_UP_MODULE = "mlp.gate_up_proj"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LAYER = re.compile(r"model\.layers\.(?P<number>0|[1-9][0-9]{0,3})\.(?P<rest>.+)")

_WRAPPED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of names in a model that also reads images, and those of its text part alone."""


def unwrap_name(name: str) -> str:
    """Return a name as in files that have only the text part of a model."""
    for prefix, own in _WRAPPED.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


FusedQkv = Literal["rows", "groups"]
"""Queries, keys and values in one matrix: one after the other, or by groups.

A group is one head of keys with its queries before it and its values after it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """How the names of an architecture's files differ from ours."""

    embedding: str = EMBEDDING
    positions: str = POSITIONS
    layers: str = "model.layers"
    norm: str = FINAL_NORM
    head: str = HEAD
    layer: Mapping[str, str] = field(default_factory=dict)
    """Names of modules within a layer: ours to theirs; most are the same."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """More of them, for blocks with two parallel norms."""
    fused_qkv: FusedQkv | None = None
    fused_gate_up: bool = False
    experts_as_columns: bool = False
    """Whether stacks of experts are [experts, in, out], with gate and up in turn."""
    stacked_head_norms: bool = False
    """Whether the norms of all heads are the rows of one tensor."""
    transposed: bool = False
    """Whether the matrices of layers are stored as [in, out]."""
    bare_prefix: str | None = None
    """What names lack in files that were saved without the output head."""
    ignored: tuple[str, ...] = ()
    """The ends of names of buffers, which older files have."""
    other_parts: tuple[str, ...] = ()
    """The beginnings of names of tensors that a text does not need: those of images, drafts."""
    grouped_delta: bool = False
    """Whether inputs of a gated DeltaNet are two matrices, by groups of one head of keys."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of a tensor lie in a stored matrix, if not one after another.

    ``block`` rows follow each other, and the next block begins ``stride`` rows later. If it is
    ``transposed``, the rows are columns of the stored matrix.
    """

    width: int
    """The columns of the stored matrix."""
    block: int = 1
    stride: int = 1
    transposed: bool = False

    def iter_ranges(
        self, first: int, rows: int, columns: int, itemsize: int
    ) -> Iterator[tuple[int, int]]:
        """Yield begin and size of the bytes of some rows, from the first one of the tensor on.

        Rows that are columns are cut out of each of the ``columns`` stored rows in turn.
        """
        if self.transposed:
            for row in range(columns):
                yield (row * self.width + first) * itemsize, rows * itemsize
            return
        size, end = columns * itemsize, first + rows
        while first < end:
            place = first % self.block
            count = min(self.block - place, end - first)
            yield (first // self.block * self.stride + place) * size, count * size
            first += count


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The source of a tensor: a whole stored tensor, or some of its rows."""

    stored_name: str
    row: int
    """The first row, with a stack viewed as one matrix."""
    info: TensorInfo
    layout: RowLayout | None = None
    """How its rows lie in the stored tensor; None: one after another."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The numbers that decide how queries, keys and values share a matrix."""

    heads: int
    kv_heads: int
    dims: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """The rows of queries, keys and values."""
        keys = self.kv_heads * self.dims
        return self.heads * self.dims, keys, keys


@dataclass(frozen=True, slots=True)
class ModulePart:
    """Our module, and which rows of a stored module it is."""

    module: str
    rows: int
    first: int = 0
    block: int | None = None  # None: one after another
    stride: int = 0

    def iter_row_blocks(self) -> Iterator[slice]:
        """Yield the rows of the stored module in our order, as slices."""
        block = self.block or self.rows
        for number in range(self.rows // block):
            begin = self.first + number * self.stride
            yield slice(begin, begin + block)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlaces:
    """The names of one base: those of its architecture, with its sizes."""

    names: StoredNames
    sizes: HeadSizes
    inner: int
    apart: bool
    """Whether its blocks have two parallel norms."""
    fused: Mapping[str, tuple[ModulePart, ...]] = field(default_factory=dict)
    """More modules of the files that are several of ours."""
    unused: frozenset[str] = frozenset()
    """Modules of which files may have tensors that the base does not use."""

    def find_stored_module(self, module: str) -> tuple[str, ModulePart | None]:
        """Return the stored module of one of ours, and which part of it, if not all."""
        match = _LAYER.fullmatch(module)
        if match is None:
            return self._find_outer(module), None
        name, part = match["rest"], None
        for whole, parts in self._list_fused().items():
            part = next((p for p in parts if p.module == name), part)
            name = whole if part is not None and part.module == name else name
        return f"{self.names.layers}.{match['number']}.{self._rename(name)}", part

    @property
    def are_usual(self) -> bool:
        """Whether files have our names and our layout."""
        return self.names == StoredNames()

    def count_rows(self, part: ModulePart) -> int:
        """Return the rows of the stored matrix that a part is in."""
        return sum(other.rows for other in self._find_siblings(part))

    def is_transposed(self, module: str, shape: tuple[int, ...]) -> bool:
        """Tell whether a tensor is stored as [in, out]."""
        return self.names.transposed and len(shape) == 2 and _LAYER.fullmatch(module) is not None

    def _find_siblings(self, part: ModulePart) -> tuple[ModulePart, ...]:
        return next(parts for parts in self._list_fused().values() if part in parts)

    def split_module(self, stored: str) -> tuple[str, tuple[ModulePart, ...]] | None:
        """Return our prefix and the parts of a stored module; None: it is not in a layer.

        A module that is not several of ours has one part without rows.
        """
        prefix, stored = f"{self.names.layers}.", unwrap_name(stored)
        number, dot, rest = stored.removeprefix(prefix).partition(".")
        if not stored.startswith(prefix) or not dot or not number.isdecimal():
            return None
        fused = self._list_fused()
        ours = {self._rename(name): name for name in (*self.names.layer, *fused)}
        name = ours.get(rest, rest)
        return f"model.layers.{number}", fused.get(name, (ModulePart(name, 0),))

    def _find_outer(self, module: str) -> str:
        names = self.names
        outer = {
            EMBEDDING: names.embedding,
            POSITIONS: names.positions,
            FINAL_NORM: names.norm,
            HEAD: names.head,
        }
        return outer.get(module, module)

    def _rename(self, name: str) -> str:
        own = {**self.names.layer, **(self.names.apart if self.apart else {})}
        if name in own:
            return own[name]
        parent = next((key for key in own if name.startswith(f"{key}.")), None)
        return name if parent is None else f"{own[parent]}{name.removeprefix(parent)}"

    def _list_fused(self) -> dict[str, tuple[ModulePart, ...]]:
        fused: dict[str, tuple[ModulePart, ...]] = dict(self.fused)
        if self.names.fused_qkv is not None:
            fused[QKV_MODULE] = tuple(self._split_qkv())
        if self.names.fused_gate_up:
            fused[GATE_UP_MODULE] = tuple(
                ModulePart(name, self.inner, n * self.inner) for n, name in enumerate(_GATE_UP)
            )
        return fused

    def _split_qkv(self) -> Iterator[ModulePart]:
        sizes = self.sizes
        grouped = self.names.fused_qkv == "groups"
        stride = sum(sizes.rows) // sizes.kv_heads
        first = 0
        for name, rows in zip(_QKV, sizes.rows, strict=True):
            block = rows // sizes.kv_heads if grouped else None
            yield ModulePart(name, rows, first, block, stride if grouped else 0)
            first += rows if block is None else block


def find_stored_rows(
    infos: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    places: StoredPlaces,
    *,
    optional: Collection[str],
    problems: list[str],
) -> dict[str, SourceRows]:
    """Return the source of every tensor by our name; what is wrong is added to ``problems``."""
    names = _complete_names(infos, places.names)
    infos = {name: infos[stored] for name, stored in names.items()}
    sources: dict[str, SourceRows] = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        source = _find_source(infos, places, module, kind, shape)
        if isinstance(source, SourceRows):
            sources[name] = source
        elif name not in optional:
            problems.append(source)
    used = {source.stored_name for source in sources.values()}
    missing = {problem.split()[1] for problem in problems if problem.startswith("tensor ")}
    unused = {name for name in infos if name.rpartition(".")[0] in places.unused}
    others = infos.keys() - used - missing - unused
    problems += [f"unexpected tensor {name[:200]}" for name in sorted(others)]
    problems[:] = list(dict.fromkeys(problems))
    return {
        name: replace(source, stored_name=names[source.stored_name])
        for name, source in sources.items()
    }


def _complete_names(stored: Collection[str], names: StoredNames) -> dict[str, str]:
    """Return stored names by complete ones: files without an output head lack a prefix.

    Buffers are left out.
    """
    prefix = names.bare_prefix or ""
    is_bare = bool(prefix) and not any(name.startswith(prefix) for name in stored)
    return {
        f"{prefix}{name}" if is_bare and not name.startswith("lm_head.") else name: name
        for name in stored
        if not name.endswith(names.ignored)
    }


def _find_source(
    infos: Mapping[str, TensorInfo],
    places: StoredPlaces,
    module: str,
    kind: str,
    shape: tuple[int, ...],
) -> SourceRows | str:
    """Return the source of a tensor, or what is wrong with it."""
    stored, part = places.find_stored_module(module)
    whole = (places.count_rows(part) if part is not None else shape[0], *shape[1:])
    first = 0 if part is None else part.first
    if places.names.stacked_head_norms and ".norms." in stored:
        stored, _, head = stored.partition(".norms.")
        sizes, first = places.sizes, int(head)
        heads = sizes.heads if stored.endswith("q_norm") else sizes.kv_heads
        whole = (heads, *shape)
    transposed = places.is_transposed(module, shape)
    whole = (whole[1], whole[0]) if transposed else whole
    name = f"{stored}.{kind}"
    info = infos.get(name)
    if info is None:
        return f"missing tensor {name[:200]}"
    if info.shape != whole:
        return f"tensor {name[:200]} is {list(info.shape)}, {list(whole)} by config.json"
    itemsize = (info.end - info.begin) // math.prod(whole)
    row_bytes = itemsize if transposed else itemsize * math.prod(whole[1:])
    begin = info.begin + first * row_bytes
    found = TensorInfo(info.dtype, shape, begin, begin + math.prod(shape) * itemsize)
    layout = None
    if transposed:
        layout = RowLayout(whole[1], transposed=True)
    elif part is not None and part.block is not None:
        layout = RowLayout(math.prod(whole[1:]), part.block, part.stride)
    return SourceRows(name, first, found, layout)
