"""The configuration of a base as transformers reads it: any architecture, nothing interpreted.

Our own decoder needs none of this. A base of an architecture that it does not know is named by its
whole ``config.json``, without the fields in `_NOT_COMPUTED`: who wrote the file, with which
library, from where, which implementation ran it there. What would make transformers run foreign
code, read other files or quantise is refused by name, at any depth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architectures import ARCHITECTURES
from expertctl.package.config_fields import Fields
from expertctl.package.model_config import (
    CONFIG_FILE,
    ModelConfig,
    parse_config,
    read_document,
)
from expertctl.schema.strict_json import JsonObject, JsonValue

_NOT_COMPUTED = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "dtype",
        "experts_implementation",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
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
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_BARE: Mapping[str, str] = {"gpt2": "transformer", "bloom": "transformer", "opt": "model"}
"""Architectures also published without their head, and the prefix that tensor names lack then."""
HEADS = ("lm_head", "embed_out")
"""What architectures call the layer that gives the scores, as wide as their tokens."""
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""What architectures call the number of tokens that they read."""
UNKNOWN_LENGTH = 2048
"""The context length of a base that does not state one."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A causal language model that transformers may run; ``values`` is all that it computes by."""

    architecture: str
    values: JsonObject

    @property
    def max_positions(self) -> int:
        """How many tokens it says that it reads; transformers may know better."""
        stated = (self.values.get(name) for name in LENGTH_NAMES)
        return next((n for n in stated if isinstance(n, int) and n > 0), UNKNOWN_LENGTH)

    def to_json(self) -> JsonObject:
        """Return what the digest of a base holds; no `ModelConfig` ever looks like it."""
        return {"engine": "transformers", "values": self.values}

    def linear_shapes(self, tensors: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of every matrix of the base, by the module's name in transformers.

        A bias is as long as the output, so it tells the layers that store a matrix as [in, out].
        A head that is tied has the shape of the matrix that it is tied to.
        """
        prefix = self._absent_prefix(tensors)
        shapes: dict[str, tuple[int, int]] = {}
        rows = self.values.get("vocab_size")
        tokens = [s for s in tensors.values() if len(s) == 2 and s[0] == rows]
        if tokens and not any(f"{head}.weight" in tensors for head in HEADS):
            shapes[HEADS[0]] = (tokens[0][0], tokens[0][1])
        for name, shape in tensors.items():
            module = name.removesuffix(".weight")
            if module != name and len(shape) == 2:
                flipped = shape[0] != shape[1] and tensors.get(f"{module}.bias") == shape[1:]
                out, into = reversed(shape) if flipped else shape
                shapes[module if module in HEADS else f"{prefix}{module}"] = (out, into)
        return shapes

    def _absent_prefix(self, tensors: Mapping[str, Shape]) -> str:
        prefix = f"{_BARE[self.architecture]}." if self.architecture in _BARE else ""
        return "" if any(name.startswith(prefix) for name in tensors) else prefix


def read_base_config(directory: Path) -> ModelConfig | ForeignConfig:
    """Read the configuration of a base: strictly where our decoder runs it.

    Raises:
        NotFoundError: when there is none.
        IncompatibleError: when neither engine runs such a model.
        InvalidPackageError: when it is malformed.
    """
    document, what = read_document(directory), str(directory / CONFIG_FILE)
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind in ARCHITECTURES:
        return parse_config(document, what=what)
    return parse_foreign(document, what=what)


def parse_foreign(document: JsonObject, *, what: str = CONFIG_FILE) -> ForeignConfig:
    """Check a configuration that transformers is to read, of whatever architecture.

    Raises:
        IncompatibleError: when it is no causal language model, or would do more than compute.
        InvalidPackageError: when it does not say what it is.
    """
    fields = Fields(document)
    kind = fields.text("model_type")
    fields.raise_problems(what)
    for name in _names(document):
        if name in _REFUSED:
            raise IncompatibleError(
                f"{what}: {name}: {_REFUSED[name]}",
                hint="use a base that transformers itself supports, in float32, float16 or "
                "bfloat16",
            )
    _require_language_model(document, kind, what)
    return ForeignConfig(kind, _computed(document))


def _require_language_model(document: JsonObject, kind: str, what: str) -> None:
    classes = document.get("architectures")
    if not isinstance(classes, list):
        raise InvalidPackageError(what, ["architectures is missing, it must name one class"])
    named = [name for name in classes if isinstance(name, str)]
    if len(classes) != 1 or len(named) != 1 or not named[0].endswith(_CAUSAL):
        raise IncompatibleError(
            f"{what}: architecture {kind[:100]!r} as {str(classes)[:200]} is not supported",
            hint="a base must be a causal language model: …ForCausalLM or …LMHeadModel",
        )


def _names(value: JsonValue) -> Iterator[str]:
    """Every key that has a value, however deep; null is what a default looks like."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if inner is not None:
                yield name
                yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def _computed(document: JsonObject) -> JsonObject:
    return {
        name: _computed(value) if isinstance(value, dict) else value
        for name, value in document.items()
        if name not in _NOT_COMPUTED
    }
