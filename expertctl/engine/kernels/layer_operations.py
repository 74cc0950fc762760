"""Per-token operations between two GEMMs: norms, activations, RoPE, KV writes and attention.

An item is one token, or one head of one token for `rope_kv_write_kernel`. Rotary tables (cosines
and sines of the positions) are computed once per run, not cached by position: every layer uses the
same ones.

A KV page holds sixteen tokens of one KV head as two packed matrices: keys ``[dim][16]``, so that
the scores of sixteen keys are one vector, and values ``[dim / 16][16][16]``, so that a product with
sixteen probabilities is one too.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES, Scheme
from expertctl.engine.kernels.program import array_address, encode_operands, row_address
from expertctl.package.architectures import Activation

_CODE = "expertctl.engine.kernels.compiled.layer_operations"
_ATTENTION_CODE = "expertctl.engine.kernels.compiled.paged_attention"
"""The modules with the code, which are imported only to compile it."""


@cache
def rms_norm_kernel() -> Kernel:
    """Return the kernel of RMSNorm: ``out = x / sqrt(mean(x^2) + eps) * weight``."""
    return load_kernel("norm", _CODE, "normalise_rows")


def rms_norm_arguments(
    *, rows: AnyArray, weight: AnyArray, out: AnyArray, eps: AnyArray
) -> AnyArray:
    """Return its arguments, all float32.

    ``weight`` is [width], ``eps`` [1], the rest [tokens, at least width].
    """
    return encode_operands(
        *row_address(rows),
        array_address(weight),
        len(weight),
        *row_address(out),
        array_address(eps),
    )


@cache
def layer_norm_kernel() -> Kernel:
    """Return the kernel of LayerNorm: that of ``x - mean(x)`` is RMSNorm's, plus a bias."""
    return load_kernel("norm layer", _CODE, "normalise_vectors")


def layer_norm_arguments(
    *, rows: AnyArray, weight: AnyArray, bias: AnyArray | None, out: AnyArray, eps: AnyArray,
    width: int,
) -> AnyArray:  # fmt: skip
    """Return its arguments, all float32; ``out`` may be ``rows``.

    The vectors of a row have ``width`` numbers each. ``weight`` is that of each, [width], or of
    all, one after another; ``bias`` is [width].
    """
    assert rows.shape[1] % width == 0, "a row has whole vectors"
    step = 0 if len(weight) == width else width * weight.itemsize
    return encode_operands(
        *row_address(rows),
        rows.shape[1] // width,
        width,
        array_address(weight),
        step,
        array_address(bias),
        *row_address(out),
        array_address(eps),
    )


@cache
def swiglu_kernel() -> Kernel:
    """Return the kernel of SwiGLU: ``out = gate * sigmoid(gate) * up``."""
    return load_kernel("gate", _CODE, "apply_swiglu")


def swiglu_arguments(*, gate: AnyArray, up: AnyArray, out: AnyArray, width: int) -> AnyArray:
    """Return its arguments; all are float32 [tokens, at least width], ``out`` may be ``gate``."""
    return encode_operands(*row_address(gate), *row_address(up), *row_address(out), width)


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
"""The activations of MLPs; kernels know them by their places here."""


@cache
def gate_kernel(activation: Activation, *, gated: bool) -> Kernel:
    """Return the kernel of ``out = activation(gate) * up``, or of ``activation(gate)``.

    It takes `swiglu_arguments`; widths are whole vectors. That of SiLU with a gate is
    `swiglu_kernel`, which takes any.
    """
    if activation == "silu" and gated:
        return swiglu_kernel()
    number = ACTIVATIONS.index(activation)
    name = f"{'gate' if gated else 'activate'} {activation}"
    return load_kernel(name, _CODE, "make_gate", activation=number, gated=int(gated))


@cache
def scaled_add_kernel() -> Kernel:
    """Return the kernel of ``out += factor * x`` and of ``out = factor * x``."""
    return load_kernel("add", _CODE, "add_scaled_rows")


def scaled_add_arguments(
    *, rows: AnyArray, out: AnyArray, factor: AnyArray, adds: bool, width: int
) -> AnyArray:
    """Return its arguments, all float32; ``factor`` is [1], ``out`` may be ``rows``."""
    return encode_operands(
        *row_address(rows), *row_address(out), array_address(factor), int(adds), width
    )


@cache
def cap_kernel() -> Kernel:
    """Return the kernel of ``x = cap * tanh(x / cap)``."""
    return load_kernel("cap", _CODE, "cap_rows")


def cap_arguments(*, rows: AnyArray, cap: AnyArray) -> AnyArray:
    """Return its arguments: float32 rows of whole vectors, and ``cap`` [1]."""
    return encode_operands(*row_address(rows), array_address(cap), rows.shape[1] // LANES)


@cache
def query_growth_kernel() -> Kernel:
    """Return the kernel that multiplies rows by ``1 + growth * ln(1 + floor(p / period))``."""
    return load_kernel("grow", _CODE, "grow_rows")


def query_growth_arguments(
    *, rows: AnyArray, positions: AnyArray, growth: AnyArray, period: int
) -> AnyArray:
    """Return its arguments: all columns of ``rows`` grow; ``growth`` is float32 [1]."""
    return encode_operands(
        *row_address(rows),
        rows.shape[1],
        array_address(positions, np.int64),
        array_address(growth),
        period,
    )


@cache
def affine_kernel() -> Kernel:
    """Return the kernel of ``out = x * scale + shift``."""
    return load_kernel("affine", _CODE, "apply_affine")


def affine_arguments(
    *, rows: AnyArray, scale: AnyArray | None, shift: AnyArray | None, out: AnyArray, width: int
) -> AnyArray:
    """Return its arguments; ``out`` may be ``rows``, scale and shift are float32 [width]."""
    return encode_operands(
        *row_address(rows), array_address(scale), array_address(shift), *row_address(out), width
    )


@cache
def gated_add_kernel() -> Kernel:
    """Return the kernel of ``out += sigmoid(gate) * x``, with one gate per token."""
    return load_kernel("share", _CODE, "add_gated_rows")


def gated_add_arguments(*, gates: AnyArray, rows: AnyArray, out: AnyArray, width: int) -> AnyArray:
    """Return its arguments, all float32; only the first column of ``gates`` is used."""
    return encode_operands(*row_address(gates), *row_address(rows), *row_address(out), width)


@cache
def rope_table_kernel() -> Kernel:
    """Return the kernel that computes rotary tables; one item is one token."""
    return load_kernel("angles", _CODE, "write_rope_table")


def rope_table_arguments(
    *, positions: AnyArray, frequencies: AnyArray, factor: AnyArray, out: AnyArray
) -> AnyArray:
    """Return its arguments: ``out`` float32 [tokens, 2, dim], cosines then sines.

    ``positions`` is int64 [tokens], ``frequencies`` float32 [dim / 2] as in `rope`; cosines and
    sines are repeated for both halves of a head and multiplied by ``factor``, float32 [1].
    """
    assert out.shape[1:] == (2, 2 * len(frequencies))
    return encode_operands(
        array_address(positions, np.int64),
        array_address(frequencies),
        len(frequencies),
        array_address(factor),
        array_address(out),
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Query heads, KV heads, head size, and the scheme of KV pages: float32 or float16."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kv_scheme: Scheme = Scheme.FLOAT32

    def __post_init__(self) -> None:
        """Check that heads are whole vectors and that KV heads have equally many query heads."""
        assert self.head_dim % KV_PAGE_TOKENS == 0
        assert self.query_heads % self.kv_heads == 0
        assert self.kv_scheme in (Scheme.FLOAT32, Scheme.FLOAT16)

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys of one head in a page; its values take as many."""
        return self.head_dim * self.kv_scheme.layout.vector_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page in one layer; its values take as many."""
        return self.kv_heads * self.head_bytes


@cache
def rope_kv_write_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel that normalises and rotates heads and writes keys and values into pages.

    One item is one head of one token. For each sixteen tokens, the items of one head come first,
    because their keys share cache lines, then those of the next: query heads, then keys, then
    values. Numbers beyond 65504 become infinite in float16.
    """
    half = int(numbers is Scheme.FLOAT16)
    return load_kernel(f"heads {numbers.value}", _CODE, "make_rope_kv_write", half=half)


def rope_kv_write_arguments(
    *,
    rows: AnyArray,
    shape: AttentionShape,
    norms: tuple[AnyArray | None, AnyArray | None],
    eps: AnyArray,
    rotations: AnyArray,
    positions: AnyArray,
    tables: AnyArray,
    offsets: tuple[int, int],
    count: AnyArray,
) -> AnyArray:
    """Return its arguments.

    ``rows`` is float32 [tokens, heads * dim]; ``norms`` of queries and keys are [dim] or None;
    ``rotations`` [tokens, 2, dim] as `rope_table_kernel` writes them; ``tables`` holds addresses of
    page lists; ``offsets`` are the bytes from the address of a page to a layer's keys and values;
    ``count``, int64 [1], is the number of tokens of the run.
    """
    return encode_operands(
        *row_address(rows),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        *(array_address(norm) for norm in norms),
        array_address(eps),
        array_address(rotations),
        array_address(positions, np.int64),
        array_address(tables, np.int64),
        *offsets,
        shape.head_bytes,
        array_address(count, np.int64),
    )


@cache
def turned_kv_write_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the same kernel for rotations other than Llama's; see `turned_kv_write_arguments`."""
    half = int(numbers is Scheme.FLOAT16)
    return load_kernel(f"turn {numbers.value}", _CODE, "make_turned_kv_write", half=half)


def turned_kv_write_arguments(
    *,
    arguments: AnyArray,
    turned: int,
    interleaved: bool,
    norms_last: bool,
) -> AnyArray:
    """Return its arguments, which begin with those of `rope_kv_write_arguments`.

    Only the first ``turned`` numbers of a head are rotated, neighbours together if
    ``interleaved``; ``rotations`` is [tokens, 2, turned]. Heads may be normed after that.
    """
    rest = encode_operands(turned, int(interleaved), int(norms_last))
    return np.concatenate((arguments, rest))


PROMPT_TOKENS_PER_ITEM, PROMPT_HEADS_PER_ITEM = 36, 4
"""Tokens of a prompt, and query heads of one KV head, that read a page together."""


@cache
def prefill_attention_kernel(numbers: Scheme = Scheme.FLOAT32, *, capped: bool = False) -> Kernel:
    """Return the kernel for consecutive tokens of one sequence; see `prefill_attention_items`.

    With ``capped``, scores are limited: a score ``s`` becomes ``c * tanh(s / c)``.
    """
    return _load_attention("prompt", "make_prefill_attention", numbers, capped=capped)


@cache
def decode_attention_kernel(numbers: Scheme = Scheme.FLOAT32, *, capped: bool = False) -> Kernel:
    """Return the kernel for one token of each sequence; one item is a token and a KV head."""
    return _load_attention("step", "make_decode_attention", numbers, capped=capped)


def _load_attention(kind: str, function: str, numbers: Scheme, *, capped: bool) -> Kernel:
    name, half = f"attend {kind} {numbers.value}", int(numbers is Scheme.FLOAT16)
    if capped:
        return load_kernel(f"{name} capped", _ATTENTION_CODE, function, half=half, capped=1)
    return load_kernel(name, _ATTENTION_CODE, function, half=half)


def prefill_attention_items(tokens: int, shape: AttentionShape) -> int:
    """Return the number of items of a prompt: some tokens and some query heads of one KV head each.

    All heads of the first tokens come first.
    """
    heads = -(-(shape.query_heads // shape.kv_heads) // PROMPT_HEADS_PER_ITEM)
    return -(-tokens // PROMPT_TOKENS_PER_ITEM) * shape.kv_heads * heads


def attention_arguments(
    *,
    rows: AnyArray,
    shape: AttentionShape,
    positions: AnyArray,
    tables: AnyArray,
    offsets: tuple[int, int],
    out: AnyArray,
    window: int | None,
    scale: AnyArray,
    count: AnyArray,
) -> AnyArray:
    """Return the arguments of either kernel; most are those of `rope_kv_write_arguments`.

    ``out`` is float32 [tokens, query heads * dim], ``scale`` float32 [1], followed by the limit of
    scores if they have one, ``count`` int64 [1] the tokens of the run. Without a window all earlier
    tokens are visible.
    """
    return encode_operands(
        *row_address(rows),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        array_address(positions, np.int64),
        array_address(tables, np.int64),
        *offsets,
        *row_address(out),
        window or 0,
        array_address(scale),
        array_address(count, np.int64),
        shape.head_bytes,
    )
