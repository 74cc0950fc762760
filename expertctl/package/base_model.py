"""A base model, read from its Hugging Face directory without torch.

A base is identified by three digests: ``arch`` (the configuration of the decoder, with the names
and shapes of all tensors), ``weights`` (the bytes of every tensor; a tied head counts once) and the
tokenizer: of the bytes of tokenizer.json (version 1) and of its canonical form (version 2, see
`expertctl.package.tokenizer`). Only safetensors are read.

A *foreign* base has an architecture that our decoder does not run. It is identified by its whole
``config.json`` and every tensor of its files. Left out are the fields in `_NOT_COMPUTED`: who wrote
the file, with which library, from where, and with which implementation. Anything that would make
transformers run foreign code, read other files or quantise is refused by name, at any depth.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from expertctl.digest import READ_CHUNK, Digest, Progress, ignore_progress
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architecture_rows import ARCHITECTURES, ELSE_FOREIGN
from expertctl.package.architectures import ConfigFields
from expertctl.package.base_tensors import (
    find_base_file,
    read_base_tensors,
    read_foreign_tensors,
)
from expertctl.package.config_document import CONFIG_FILE, TEXT_PARTS, read_config_document
from expertctl.package.model_config import ModelConfig, parse_model_config
from expertctl.package.stored_tensor import ExactCodec, StoredTensor
from expertctl.package.tokenizer import MAX_TOKENIZER_BYTES, compute_tokenizer_digest
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, read_bounded

MAX_HASHING_THREADS = 4


class _HashingCancelledError(Exception):
    """Raised in hashing threads when the digest is no longer needed."""


@contextmanager
def open_hashing_threads() -> Iterator[tuple[ThreadPoolExecutor, Progress]]:
    """Give a thread pool, and a function that its threads must call for every chunk they hash.

    After the block was left by an exception, the function raises, so that hashing even large files
    stops soon; otherwise Ctrl-C would wait for all files being hashed.
    """
    given_up = Event()

    def go_on(_: int) -> None:
        if given_up.is_set():
            raise _HashingCancelledError

    with ThreadPoolExecutor(min(MAX_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        try:
            yield pool, go_on
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_NOT_COMPUTED = frozenset(
    (
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("dtype", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash"),
        *("transformers_version", "use_cache"),
    )
)
_REFUSED: Mapping[str, str] = {
    "auto_map": "it names code of its own, which is never run",
    "custom_pipelines": "it names code of its own, which is never run",
    "trust_remote_code": "code that comes with a model is never run",
    "quantization_config": "quantised weights are not supported",
    "compression_config": "quantised weights are not supported",
    "transformers_weights": "it names other weights than the base has",
    "fusion_config": "replaced layers are not supported",
    "kernel_config": "replaced layers are not supported",
    "distributed_config": "models in several parts are not supported",
}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_BARE_MODELS: Mapping[str, str] = {"gpt2": "transformer", "bloom": "transformer", "opt": "model"}
"""Architectures also published without their head, and the prefix their tensor names lack then."""
HEAD_NAMES = ("lm_head", "embed_out")
"""The names of the output head in all architectures."""
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""The names of the context length in all architectures."""
DEFAULT_MAX_POSITIONS = 2048
"""The context length, in tokens, of a base that does not state one."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A causal language model for transformers; ``values`` is everything that it computes by."""

    architecture: str
    values: JsonObject

    @property
    def max_positions(self) -> int:
        """The stated context length, in tokens; transformers may know better."""
        stated = (self.values.get(name) for name in LENGTH_NAMES)
        return next((n for n in stated if isinstance(n, int) and n > 0), DEFAULT_MAX_POSITIONS)

    def to_json(self) -> JsonObject:
        """Return the input of the base's digest, distinct from that of any `ModelConfig`."""
        return {"engine": "transformers", "values": self.values}

    def linear_shapes(self, tensors: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of every matrix of the base, by the module's name in transformers.

        A bias has the size of the output, which identifies layers that store a matrix as [in, out].
        A tied head has the shape of the matrix that it is tied to.
        """
        prefix = self._find_absent_prefix(tensors)
        shapes: dict[str, tuple[int, int]] = {}
        rows = self.values.get("vocab_size")
        tokens = [s for s in tensors.values() if len(s) == 2 and s[0] == rows]
        if tokens and not any(f"{head}.weight" in tensors for head in HEAD_NAMES):
            shapes[HEAD_NAMES[0]] = (tokens[0][0], tokens[0][1])
        for name, shape in tensors.items():
            module = name.removesuffix(".weight")
            if module != name and len(shape) == 2:
                flipped = shape[0] != shape[1] and tensors.get(f"{module}.bias") == shape[1:]
                out, into = reversed(shape) if flipped else shape
                shapes[module if module in HEAD_NAMES else f"{prefix}{module}"] = (out, into)
        return shapes

    def _find_absent_prefix(self, tensors: Mapping[str, Shape]) -> str:
        prefix = f"{_BARE_MODELS[self.architecture]}." if self.architecture in _BARE_MODELS else ""
        return "" if any(name.startswith(prefix) for name in tensors) else prefix


def read_base_config(directory: Path) -> ModelConfig | ForeignConfig:
    """Read the configuration of a base, strictly if our decoder runs it.

    Raises:
        NotFoundError: when there is none.
        IncompatibleError: when neither engine runs such a model.
        InvalidPackageError: when it is malformed.
    """
    document, what = read_config_document(directory), str(directory / CONFIG_FILE)
    kind = document.get("model_type")
    if isinstance(kind, str) and kind in {*ELSE_FOREIGN, *TEXT_PARTS}:
        try:
            return parse_model_config(document, what=what)
        except IncompatibleError:
            return parse_foreign_config(document, what=what)
    if not isinstance(kind, str) or kind in ARCHITECTURES:
        return parse_model_config(document, what=what)
    return parse_foreign_config(document, what=what)


def parse_foreign_config(document: JsonObject, *, what: str = CONFIG_FILE) -> ForeignConfig:
    """Check a configuration of any architecture for use with transformers.

    Raises:
        IncompatibleError: when it is no causal language model, or would do more than compute.
        InvalidPackageError: when it does not say what it is.
    """
    fields = ConfigFields(document)
    kind = fields.read_text("model_type")
    fields.raise_problems(what)
    for name in _iter_names(document):
        if name in _REFUSED:
            raise IncompatibleError(
                f"{what}: {name}: {_REFUSED[name]}",
                hint="use a base that transformers itself supports, in float32, float16 or "
                "bfloat16",
            )
    _require_language_model(document, kind, what)
    return ForeignConfig(kind, _strip_uncomputed(document))


def _require_language_model(document: JsonObject, kind: str, what: str) -> None:
    classes = document.get("architectures")
    if not isinstance(classes, list):
        raise InvalidPackageError(what, ["architectures is missing, it must name one class"])
    named = [name for name in classes if isinstance(name, str)]
    if len(classes) != 1 or len(named) != 1 or not named[0].endswith(_CAUSAL_SUFFIXES):
        raise IncompatibleError(
            f"{what}: architecture {kind[:100]!r} as {str(classes)[:200]} is not supported",
            hint="a base must be a causal language model: …ForCausalLM or …LMHeadModel",
        )


def _iter_names(value: JsonValue) -> Iterator[str]:
    """Yield every key with a non-null value, at any depth; null looks like a default."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if inner is not None:
                yield name
                yield from _iter_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_names(inner)


def _strip_uncomputed(document: JsonObject) -> JsonObject:
    return {
        name: _strip_uncomputed(value) if isinstance(value, dict) else value
        for name, value in document.items()
        if name not in _NOT_COMPUTED
    }


TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """A base by name and content; ``weights`` is ``None`` if they were not hashed."""

    name: str
    revision: str | None
    arch: Digest
    weights: Digest | None
    tokenizer: Digest
    """Version 1: of the file, or of an earlier one with the same canonical form."""
    canonical_tokenizer: Digest | None = field(default=None, compare=False)
    """Version 2, derived from the file; ``None`` if the file is no longer readable."""

    def tokenizer_for_version(self, version: int) -> Digest | None:
        """Return the tokenizer digest that packages with this ``tokenizer_version`` state."""
        return self.tokenizer if version == 1 else self.canonical_tokenizer


def differs_in_tokenizer_form_only(known: BaseIdentity, found: BaseIdentity) -> bool:
    """Tell whether two bases differ at most in the notation of tokenizer.json."""
    canonical_form = known.canonical_tokenizer
    same_form = canonical_form is not None and canonical_form == found.canonical_tokenizer
    same_tokenizer = known.tokenizer == found.tokenizer or same_form
    return same_tokenizer and replace(found, tokenizer=known.tokenizer) == known


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What an adapter is checked against: identity, and (out, in) of the linear layers."""

    identity: BaseIdentity
    shapes: Mapping[str, tuple[int, int]]
    foreign: bool = False
    """Whether only ``run --engine transformers`` runs it."""
    directory: Path | None = field(default=None, compare=False)
    """The directory of its files; ``None`` if they are not on this machine."""


@dataclass(frozen=True, slots=True)
class BaseHeaders:
    """The contents of the small files and tensor headers of a base, without its weights."""

    config: JsonObject
    tensors: Mapping[str, StoredTensor]
    """Sorted by name, without a stored copy of a tied head."""
    shapes: Mapping[str, tuple[int, int]]
    foreign: bool


def read_base_headers(directory: Path) -> BaseHeaders:
    """Read a base without its weights; raises as `read_base`."""
    config = read_base_config(directory)
    match config:
        case ModelConfig():
            stored = read_base_tensors(directory, config)
            tensors = {name: stored[name] for name in sorted(config.tensor_shapes())}
            return BaseHeaders(config.to_json(), tensors, config.adapted_shapes(), foreign=False)
        case ForeignConfig():
            tensors = read_foreign_tensors(directory)
            shapes = config.linear_shapes({n: t.info.shape for n, t in tensors.items()})
            return BaseHeaders(config.to_json(), tensors, shapes, foreign=True)


def read_base(
    directory: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    progress: Progress = ignore_progress,
) -> BaseFacts:
    """Read and hash a whole base; ``name`` defaults to that of the directory.

    Raises:
        NotFoundError: when the directory or one of its files is missing.
        IncompatibleError: when no engine supports such a model.
        InvalidPackageError: when it is not a readable base.
    """
    headers = read_base_headers(directory)
    tokenizer = _read_tokenizer(directory, progress)
    identity = BaseIdentity(
        name=name or directory.resolve().name,
        revision=revision,
        arch=_compute_arch_digest(headers),
        weights=_hash_weights(headers.tensors, progress),
        tokenizer=Digest.compute(tokenizer),
        canonical_tokenizer=compute_tokenizer_digest(tokenizer, what=TOKENIZER_FILE),
    )
    return BaseFacts(identity, headers.shapes, headers.foreign, directory)


def compute_weights_digest(
    tensors: Mapping[str, StoredTensor], digests: Mapping[str, str]
) -> Digest:
    """Return the digest of a base's weights, over name, storage and hex sha256 of each tensor.

    Dtypes and shapes of the parts that a codec decodes decide what the bytes mean, so they count.
    """
    rows: list[list[Any]] = []
    for name in sorted(digests):
        codec = tensors[name].codec
        parts = () if codec is None or isinstance(codec, ExactCodec) else codec.parts
        forms = [[part.info.dtype, list(part.info.shape)] for part in parts]
        rows.append([name, tensors[name].storage, digests[name], *([forms] if forms else [])])
    return Digest.compute(encode_canonical(rows))


def _compute_arch_digest(headers: BaseHeaders) -> Digest:
    shapes = [[name, list(tensor.info.shape)] for name, tensor in headers.tensors.items()]
    return Digest.compute(encode_canonical({"config": headers.config, "tensors": shapes}))


def _read_tokenizer(directory: Path, progress: Progress) -> bytes:
    data = read_bounded(find_base_file(directory, TOKENIZER_FILE), max_bytes=MAX_TOKENIZER_BYTES)
    progress(len(data))
    return data


def _hash_weights(tensors: Mapping[str, StoredTensor], progress: Progress) -> Digest:
    """Hash every tensor in threads; both hashing and reading release the interpreter lock."""
    digests: dict[str, str] = {}
    with open_hashing_threads() as (pool, go_on):
        tasks = {pool.submit(hash_tensor, tensor, go_on): n for n, tensor in tensors.items()}
        for task in as_completed(tasks):
            digests[tasks[task]] = task.result()
            progress(tensors[tasks[task]].size)
    return compute_weights_digest(tensors, digests)


def hash_tensor(tensor: StoredTensor, progress: Progress = ignore_progress) -> str:
    """Return the hex sha256 of a tensor's bytes as they are stored; ``progress`` may raise.

    Raises:
        InvalidPackageError: when a file is cut short.
    """
    hasher = hashlib.sha256()

    def use(chunk: memoryview) -> None:
        progress(len(chunk))
        hasher.update(chunk)

    if isinstance(tensor.codec, ExactCodec):
        for chunk in tensor.codec.iter_plain_bytes():
            use(memoryview(chunk))
        return hasher.hexdigest()
    for part in (tensor,) if tensor.codec is None else tensor.codec.parts:
        _read_tensor(part, use)
    return hasher.hexdigest()


def _read_tensor(tensor: StoredTensor, use: Callable[[memoryview], None]) -> None:
    buffer = memoryview(bytearray(min(READ_CHUNK, tensor.size)))
    try:
        opened = tensor.open()
    except InvalidPackageError as error:
        problem = f"{tensor.path.name} changed while it was read"
        raise InvalidPackageError(str(tensor.path.parent), [problem]) from error
    with opened as stream:
        for offset, size in tensor.iter_ranges():
            stream.seek(offset)
            left = size
            while left:
                count = stream.readinto(buffer[: min(len(buffer), left)])
                if not count:
                    raise InvalidPackageError(str(tensor.path), ["the file is cut short"])
                use(buffer[:count])
                left -= count
