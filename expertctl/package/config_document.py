"""``config.json`` of a base: the document, and the part of it that describes the decoder."""

from pathlib import Path

from expertctl.errors import NotFoundError
from expertctl.package.architectures import ConfigFields
from expertctl.schema.strict_json import JsonObject, load_object

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""PEFT's name of an adapter configuration."""
_MAX_CONFIG_BYTES = 1 << 20
TEXT_PARTS = {
    "qwen3_5": ("qwen3_5_text", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    ),
}
"""Models that also read images, by ``model_type``: their decoder's architecture, their classes."""


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
        data = path.read_bytes()
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
    if document.get("model_type") in {name for name, _ in TEXT_PARTS.values()}:
        return _drop_image_rope(document)
    kind, classes = document.get("model_type"), document.get("architectures")
    text, usual = TEXT_PARTS.get(str(kind), (None, ()))
    if text is None or not (classes is None or classes in [[name] for name in usual]):
        return document
    inner = ConfigFields(document).read_nested("text_config")
    inner.raise_problems(what)
    tied = document.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    kept = {n: v for n, v in inner.values.items() if n != "architectures"}
    return _drop_image_rope({**kept, "model_type": text, "tie_word_embeddings": tied})


def _drop_image_rope(document: JsonObject) -> JsonObject:
    """Return a configuration without what places images: tokens of a text have one position."""
    found = document.get("rope_parameters")
    if not isinstance(found, dict):
        return document
    kept = {n: v for n, v in found.items() if n not in ("mrope_section", "mrope_interleaved")}
    return {**document, "rope_parameters": kept}
