"""The plain decoder: bases of any size in numpy, dense or with routed experts, with a plan.

It is the decoder of small bases, which compiled kernels would only delay, of sizes that kernels do
not support, and of machines without numba. Prefill and decode are separate calls with separate
results. A decoder has no generation state: that is in the `PagedKVCache` of each call, so several
generations may alternate; one call runs at a time. Activations are float32, [tokens, features];
base weights are read-only.

The pages of a layer are gathered in one buffer, which all layers share, before the layer attends.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.steps import EMPTY_DELTAS, Deltas
from expertctl.engine.arrays import AnyArray, FloatArray, widen
from expertctl.engine.cpu.plain_functional import (
    QueryBlock,
    StackedLinear,
    attend,
    cap_softly,
    sigmoid,
    split_queries,
)
from expertctl.engine.cpu.plain_layers import PlainLayer, build_norm, build_plain_layers
from expertctl.engine.cpu.plain_varied_layers import build_token_inputs, pad_heads
from expertctl.engine.cpu.plain_weights import StoredMatrix, WeightTensors
from expertctl.engine.cpu.rope import RotationTable, compute_rotation_table
from expertctl.engine.decoding import (
    PREFILL_CHUNK,
    DecodeResult,
    LayerTimer,
    PrefillResult,
    check_modules,
    check_soft_prompt,
    check_tokens,
    make_token_input_error,
)
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache, count_pages
from expertctl.engine.kv.kv_cache import rewind_on_error
from expertctl.engine.text.prompt import LOGIT_ROWS, RecordLogits
from expertctl.package.block_config import RopeKind
from expertctl.package.model_config import (
    EMBEDDING_TENSOR,
    HEAD_BIAS_TENSOR,
    POSITIONS_TENSOR,
    ModelConfig,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """The rows of a pass that attend: from ``begin`` on, in blocks per window."""

    begin: int
    blocks: dict[int | None, list[QueryBlock]]


@dataclass(frozen=True, slots=True, eq=False)
class _PlainPass:
    """What all layers share in one pass over ``tokens`` tokens from position ``start`` on."""

    start: int
    tokens: int
    pages: Sequence[AnyArray]
    tables: dict[RopeKind, RotationTable]
    deltas: Deltas
    state: AnyArray | None
    """The state of earlier tokens in layers without keys and values."""
    states: dict[int, AnyArray]
    """Those that the pass makes, by how many of its tokens they are after."""
    embedded: AnyArray | None
    """The embeddings of tokens that each layer reads, [layers, tokens, size]."""

    def take_states(self, place: int) -> tuple[AnyArray | None, dict[int, AnyArray]]:
        """Return both for one of those layers, in their order."""
        made = {tokens: state[place] for tokens, state in self.states.items()}
        return None if self.state is None else self.state[place], made


class PlainDecoder:
    """A base model that can be run; its weights are shared by all generations."""

    def __init__(self, config: ModelConfig, weights: WeightTensors) -> None:
        """Group the weights by layer."""
        self.config = config
        self.modules = frozenset(config.linear_shapes())
        self._weights = weights
        self._embedding = weights.tensors[EMBEDDING_TENSOR]
        self._positions = weights.tensors.get(POSITIONS_TENSOR)
        self._norm = build_norm(config, weights, "model.norm")
        head = weights.get_output_matrix()
        bias = weights.tensors.get(HEAD_BIAS_TENSOR)
        self._head = StackedLinear(("lm_head",), head, bias, (len(head),))
        self._layers = build_plain_layers(config, weights)
        kinds = [layer.delta_net is None for layer in self._layers]
        self._places = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
        """The place of each layer among those with keys and values, or those without."""
        self._token_inputs = build_token_inputs(config, weights)
        scale = config.block.attention_scale
        self._scale = np.float32(config.head_dim**-0.5 if scale is None else scale)
        self._rotations: dict[RopeKind, RotationTable] = {}
        self._gathered: AnyArray | None = None
        self._times: LayerTimer | None = None

    @contextmanager
    def time_layers(self, times: LayerTimer) -> Iterator[None]:
        """Add the time of each part to ``times`` inside the ``with`` block."""
        self._times = times
        try:
            yield
        finally:
            self._times = None

    def prefill(
        self,
        ids: Sequence[int],
        cache: PagedKVCache,
        deltas: Deltas = EMPTY_DELTAS,
        *,
        soft_prompt: AnyArray | None = None,
        chunk: int = PREFILL_CHUNK,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> PrefillResult:
        """Read a prompt, ``chunk`` tokens at a time; ``progress`` counts them and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], precede the first token of a
        cache and count like tokens. ``scores`` gets the logits of every position.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token, a delta or a soft prompt that does not fit this base.
        """
        started = time.perf_counter()
        tokens = self._check_tokens(ids, deltas)
        before = self._check_soft_prompt(soft_prompt, cache)
        read = len(before) + len(tokens)
        cache.ensure_capacity(read)
        hidden = before
        with rewind_on_error([cache]), _ignore_float_errors():
            for start in range(0, read, chunk):
                part = self._embed(before, tokens, start, min(start + chunk, read))
                first, own = cache.length, tokens[max(start - len(before), 0) :]
                hidden = self._forward(part, own, cache, deltas, whole=scores is not None)
                if scores is not None:
                    self._record_scores(hidden, deltas, first, scores)
                progress(len(part))
            logits = self._compute_logits(hidden, deltas)
        return PrefillResult(logits, read, _measure_ms(started))

    def read_hidden(
        self,
        ids: Sequence[int],
        cache: PagedKVCache,
        *,
        between_layers: Callable[[], None] = lambda: None,
    ) -> AnyArray:
        """Read a text in one pass; return what `score` takes, float32 [tokens, hidden].

        ``between_layers`` is called before each layer and may raise.

        Raises:
            UsageError: for a text without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token that this base does not have.
        """
        tokens = self._check_tokens(ids, EMPTY_DELTAS)
        cache.ensure_capacity(len(tokens))
        with rewind_on_error([cache]), _ignore_float_errors():
            return self._forward(
                self._look_up(tokens),
                tokens,
                cache,
                EMPTY_DELTAS,
                whole=True,
                between_layers=between_layers,
            )

    def score(self, hidden: AnyArray, deltas: Deltas = EMPTY_DELTAS) -> AnyArray:
        """Return the logits after tokens: [tokens, hidden] -> [tokens, vocab]."""
        block, logits = self.config.block, self._head(self._norm(hidden), deltas)
        if block.logit_scale != 1.0:
            logits *= np.float32(block.logit_scale)
        if block.logit_cap is not None:
            cap_softly(logits, block.logit_cap)
        return logits

    def decode(
        self, token: int, cache: PagedKVCache, deltas: Deltas = EMPTY_DELTAS
    ) -> DecodeResult:
        """Read one more token.

        Raises:
            BudgetError: when the cache is full.
            IncompatibleError: for a token or a delta that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        tokens = self._check_tokens([token], deltas)
        cache.ensure_capacity(1)
        with rewind_on_error([cache]), _ignore_float_errors():
            hidden = self._forward(self._look_up(tokens), tokens, cache, deltas)
            logits = self._compute_logits(hidden, deltas)
        return DecodeResult(logits, position, _measure_ms(started))

    def free_buffers(self) -> None:
        """Free what all steps of one generation share; it counts as buffers of its passes."""
        self._rotations, self._gathered = {}, None

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return not self._rotations and self._gathered is None

    def matrix(self, module: str) -> FloatArray:
        """Return the weights [out, in] of a linear layer, by its module name, as a view."""
        stored = self._weights.tensors.get(f"{module}.weight")
        weight = self._head.weight if module == "lm_head" else stored
        assert weight is not None
        assert not isinstance(weight, StoredMatrix)
        return weight

    def _check_tokens(self, ids: Sequence[int], deltas: Deltas) -> AnyArray:
        if deltas:
            check_modules(deltas, self.modules)
        return check_tokens(ids, self.config.vocab_size)

    def _check_soft_prompt(self, soft_prompt: AnyArray | None, cache: PagedKVCache) -> AnyArray:
        """Return the rows before the first token, [virtual tokens, hidden], often none."""
        width = self.config.hidden_size
        if soft_prompt is None:
            return np.empty((0, width), np.float32)
        check_soft_prompt(soft_prompt, width, length=cache.length)
        if self._token_inputs is not None:
            raise make_token_input_error()
        return widen(soft_prompt)

    def _embed(self, before: AnyArray, tokens: AnyArray, start: int, end: int) -> AnyArray:
        """Return some rows of [soft prompt, embedded tokens]: [end - start, hidden], float32.

        The caller may change them.
        """
        virtual = len(before)
        part = self._look_up(tokens[max(start - virtual, 0) : max(end - virtual, 0)])
        if start >= virtual:
            return part
        rows = before[start:end]
        if self.config.block.scales_virtual_tokens:
            rows = rows * np.float32(self.config.block.embedding_scale)
        return np.concatenate((rows, part))

    def _look_up(self, tokens: AnyArray) -> AnyArray:
        """Return the embeddings of tokens, float32 [tokens, hidden]; the caller may change them."""
        rows = widen(self._embedding[tokens])
        if self.config.block.embedding_scale != 1.0:
            rows *= np.float32(self.config.block.embedding_scale)
        return rows

    def _forward(
        self,
        x: AnyArray,
        ids: AnyArray,
        cache: PagedKVCache,
        deltas: Deltas,
        *,
        whole: bool = False,
        between_layers: Callable[[], None] = lambda: None,
    ) -> AnyArray:
        """Run all layers over one part of a sequence: [tokens, hidden] -> [tokens, hidden].

        ``ids`` begin with the tokens of the part. Only the last row is returned unless ``whole`` is
        set: the last layer writes the keys and values of all tokens, but its output for the other
        rows is not needed.
        """
        step = self._start_pass(x, ids[: len(x)], cache, deltas)
        if self._positions is not None:
            x += widen(self._positions[np.arange(step.start, step.start + len(x))])
        queries = self._plan_queries(step, begin=0)
        for number, layer in enumerate(self._layers):
            between_layers()
            if number == len(self._layers) - 1 and not whole and step.tokens > 1:
                queries = self._plan_queries(step, begin=step.tokens - 1)
            with self._time_place(f"layers.{number}.attention"):
                made, read = self._attend(x, layer, number, step, queries)
                x = layer.add_attention(x[queries.begin :], made)
            with self._time_place(f"layers.{number}.mlp"):
                layer.add_mlp(x, None if read is None else read[queries.begin :], deltas)
                del read
                if layer.varied is not None:
                    own = None if step.embedded is None else step.embedded[number, queries.begin :]
                    layer.varied.finish(x, own, deltas)
        cache.advance(step.tokens)
        if cache.states is not None:
            states = {step.start + n: state for n, state in step.states.items()}
            cache.states.add(states, is_prompt=step.tokens > 1)
        return x

    def _start_pass(
        self, x: AnyArray, ids: AnyArray, cache: PagedKVCache, deltas: Deltas
    ) -> _PlainPass:
        assert cache.layout == ROW_PAGES, "its pages are rows"
        tokens = len(x)
        start, end = cache.length, cache.length + tokens
        if any(table.positions < end for table in self._rotations.values()) or not self._rotations:
            self._rotations = {}
            self._rotations = self._make_tables(min(1 << (end - 1).bit_length(), cache.capacity))
        tables = {kind: table.slice(start, end) for kind, table in self._rotations.items()}
        state, states = None, dict[int, AnyArray]()
        if cache.states is not None:
            places, shape = cache.states.list_positions(start, tokens), cache.states.shape
            state = cache.states.current
            states = {place - start: np.empty(shape, np.float32) for place in places}
        inputs = self._token_inputs
        embedded = None if inputs is None else inputs(ids, x, deltas)
        return _PlainPass(start, tokens, cache.pages, tables, deltas, state, states, embedded)

    def _make_tables(self, positions: int) -> dict[RopeKind, RotationTable]:
        """Return the tables of all kinds of layers that rotate."""
        block = self.config.block
        ropes = {"global": self.config.rope, "local": block.local_rope}
        kinds = {layer.rope for layer in self._layers}
        return {
            kind: compute_rotation_table(rope, positions, interleaved=block.interleaved)
            for kind, rope in ropes.items()
            if kind in kinds and rope is not None
        }

    def _plan_queries(self, step: _PlainPass, *, begin: int) -> _Queries:
        queries, heads = _Queries(begin, {}), self.config.heads
        for window in set(self.config.windows):
            queries.blocks[window] = split_queries(
                step.start, step.tokens, window, heads=heads, begin=begin
            )
        return queries

    def _attend(
        self, x: AnyArray, layer: PlainLayer, number: int, step: _PlainPass, queries: _Queries
    ) -> tuple[AnyArray, AnyArray | None]:
        """Write keys and values of all rows; return the attention output of the ``queries``.

        Returned as well is what the MLP of a parallel layer reads, of all rows.
        """
        config, tokens = self.config, len(x)
        normed = layer.norm_input(x)
        made = layer.inputs(normed, step.deltas)
        read = layer.select_mlp_input(x, normed)
        del normed
        if layer.delta_net is not None:
            out = layer.delta_net(made, *step.take_states(self._places[number]))
            return layer.output(out[queries.begin :], step.deltas), read
        wide, turned = layer.rotated_end, (tokens, -1, layer.head_dim)
        if layer.varied is None:
            values = made[:, wide : layer.inputs.ends[2]].reshape(turned)
        else:
            values = layer.varied.make_values(made, layer.inputs, layer.head_dim)
        norms = layer.head_norms
        if norms is not None and not norms.after_rope:
            norms.apply(made, layer.inputs.ends)
        heads = made[:, :wide].reshape(turned)  # queries and keys
        heads = layer.rotate(heads, step.tables.get(layer.rope))
        if norms is not None and norms.after_rope:
            norms.apply(heads.reshape(tokens, wide), layer.inputs.ends)
        fresh = heads[:, config.heads :], values
        blocks = queries.blocks[layer.window]
        keys, values = self._exchange_rows(self._places[number], step, fresh, blocks[0].first)
        asking = heads[queries.begin :, : config.heads]
        asking *= self._scale
        if config.block.query_growth:
            asking *= self._compute_query_growth(step)[queries.begin :, None, None]
        out = np.empty((tokens - queries.begin, config.heads, layer.head_dim), np.float32)
        earlier = step.start + tokens - keys.shape[1]
        for block in blocks:
            rows = slice(block.begin - queries.begin, block.end - queries.begin)
            seen = slice(block.first - earlier, block.last - earlier)
            part = asking[rows], keys[:, seen], values[:, seen]
            cap, sinks = config.block.attention_cap, layer.sinks
            attend(*part, block, out[rows], cap=cap, sinks=sinks)
        flat = out.reshape(len(out), -1)
        if config.delta_net is not None:
            flat *= sigmoid(made[queries.begin :, layer.inputs.ends[2] :])
        return layer.output(flat, step.deltas), read

    def _compute_query_growth(self, step: _PlainPass) -> AnyArray:
        """Return the factor on the queries of each token, float32 [tokens]."""
        block = self.config.block
        positions = np.arange(step.start, step.start + step.tokens)
        steps = positions // block.query_growth_positions
        found: AnyArray = 1 + block.query_growth * np.log1p(steps)
        return found.astype(np.float32)

    def _exchange_rows(
        self, layer: int, step: _PlainPass, fresh: tuple[AnyArray, AnyArray], first: int
    ) -> tuple[AnyArray, AnyArray]:
        """Write the rows of a pass, keys and values [tokens, kv_heads, head_dim], to the pages.

        Returns all keys and values [kv_heads, length, head_dim] of the layer, which is counted
        among those that have them, from the page of position ``first`` on.
        """
        start, end = step.start, step.start + step.tokens
        for place in range(start // KV_PAGE_TOKENS, count_pages(end)):
            begin, page = place * KV_PAGE_TOKENS, step.pages[place][layer]
            rows = slice(max(start - begin, 0), min(end - begin, KV_PAGE_TOKENS))
            some = slice(begin + rows.start - start, begin + rows.stop - start)
            for kind, numbers in enumerate(fresh):
                page[kind, :, rows] = pad_heads(numbers[some], self.config).swapaxes(0, 1)
        sizes = self.config.get_layer_sizes(layer)
        layer = layer if sizes.source is None else sizes.source
        before = first // KV_PAGE_TOKENS
        pages = [page[layer] for page in step.pages[before : count_pages(end)]]
        both = pages[0] if len(pages) == 1 else self._gather(pages, step)
        length = end - before * KV_PAGE_TOKENS
        keys, values = both[:, : sizes.kv_heads, :length, : sizes.head_dim]
        return keys, values

    def _gather(self, pages: Sequence[AnyArray], step: _PlainPass) -> AnyArray:
        """Return the pages of a layer as one array [2, kv_heads, tokens, head_dim]."""
        kinds, heads, tokens, dims = pages[0].shape
        size = kinds * heads * tokens * dims
        if self._gathered is None or len(self._gathered) < size * len(pages):
            self._gathered = None
            self._gathered = np.empty(size * len(step.pages), np.float32)
        room = self._gathered[: size * len(pages)].reshape(kinds, heads, -1, dims)
        return np.concatenate(pages, axis=2, out=room)

    def _compute_logits(self, hidden: AnyArray, deltas: Deltas) -> AnyArray:
        """Compute the logits after the last token: [tokens, hidden] -> [vocab]."""
        with self._time_place("head"):
            logits: AnyArray = self.score(hidden[-1:], deltas)[0]
            return logits

    def _record_scores(
        self, hidden: AnyArray, deltas: Deltas, first: int, scores: RecordLogits
    ) -> None:
        """Pass on the logits of all rows [tokens, hidden] in parts; ``first`` is their position."""
        for begin in range(0, len(hidden), LOGIT_ROWS):
            scores(first + begin, self.score(hidden[begin : begin + LOGIT_ROWS], deltas))

    def _time_place(self, place: str) -> AbstractContextManager[None]:
        return _UNTIMED if self._times is None else self._measure(self._times, place)

    @contextmanager
    def _measure(self, times: LayerTimer, place: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        times.add(place, time.perf_counter() - started)


_UNTIMED = nullcontext()


def _ignore_float_errors() -> AbstractContextManager[None]:
    """Compute without warnings: `silu` overflows, and weights or a plan may be no numbers."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _measure_ms(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
