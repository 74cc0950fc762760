"""``config.json`` of a base: the document, and the part of it that describes the decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from expertctl.errors import NotFoundError
from expertctl.package.architectures import ConfigFields
from expertctl.schema.strict_json import JsonObject, load_object

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""PEFT's name of an adapter configuration."""
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """The decoder of a model that also reads images."""

    model_type: str
    """Its architecture."""
    classes: tuple[str, ...]
    """The classes of the whole model that transformers saves."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What transformers leaves out of the configuration of the text part."""


TEXT_PARTS: Mapping[str, DecoderPart] = {
    "gemma3": DecoderPart(
        "gemma3_text",
        ("Gemma3ForConditionalGeneration",),
        {"vocab_size": 262208, "num_attention_heads": 8},
    ),
    "qwen3_5": DecoderPart(
        "qwen3_5_text", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    ),
    "qwen3_5_moe": DecoderPart(
        "qwen3_5_moe_text", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
    ),
}
"""By the ``model_type`` of the whole model."""
_TEXT_TYPES = frozenset(part.model_type for part in TEXT_PARTS.values())


def read_config_document(directory: Path) -> JsonObject:
    """Read ``config.json`` of a base without interpreting it.

    Raises:
        NotFoundError: when there is none.
        InvalidPackageError: when it is malformed.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: no such directory", hint="name the one that config.json is in"
        )
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        if (directory / ADAPTER_CONFIG_FILE).is_file():
            raise NotFoundError(
                f"{directory} is an adapter, not a base model",
                hint=f"`expertctl build {directory}` packs it; a base has a {CONFIG_FILE}",
            ) from error
        raise NotFoundError(
            f"{directory}: {CONFIG_FILE} is missing or cannot be read",
            hint="a base is a Hugging Face directory with config.json and safetensors",
        ) from error
    return load_object(data, what=str(path), max_bytes=_MAX_CONFIG_BYTES)


def select_text_part(document: JsonObject, what: str) -> JsonObject:
    """Return the configuration of the decoder of a model that also reads images, or the same one.

    Raises:
        InvalidPackageError: when it has none.
    """
    if document.get("model_type") in _TEXT_TYPES:
        return _drop_image_rope(document)
    part, classes = TEXT_PARTS.get(str(document.get("model_type"))), document.get("architectures")
    if part is None or not (classes is None or classes in [[name] for name in part.classes]):
        return document
    inner = ConfigFields(document).read_nested("text_config")
    inner.raise_problems(what)
    if inner.get("model_type") not in (None, part.model_type):
        return document
    tied = document.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    kept = {n: v for n, v in inner.values.items() if n != "architectures"}
    own = {"model_type": part.model_type, "tie_word_embeddings": tied}
    return _drop_image_rope({**part.defaults, **kept, **own})


def _drop_image_rope(document: JsonObject) -> JsonObject:
    """Return a configuration without what places images: tokens of a text have one position."""
    found = document.get("rope_parameters")
    if not isinstance(found, dict):
        return document
    kept = {n: v for n, v in found.items() if n not in ("mrope_section", "mrope_interleaved")}
    return {**document, "rope_parameters": kept}
