"""What the configuration of a soft prompt, from prompt tuning or P-tuning, decides about it.

PEFT saves what the prompt encoder gave, so the settings of the encoder and of the initialisation
have no effect any more: they are labels, and the tokenizer that they name is never opened.
"""

from dataclasses import dataclass
from typing import Any, Literal

from expertctl.schema.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class SoftPromptConfig:
    """How many virtual tokens there are, and how wide their embeddings."""

    tokens: int
    width: int | None
    """``None`` where the configuration does not say: then the tensor decides."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["soft_prompt"]:
        """The kind of adapter."""
        return "soft_prompt"


def soft_prompt_config_of(document: JsonObject) -> SoftPromptConfig:
    """Return a configuration that the schema let through."""
    values: dict[str, Any] = dict(document)
    width = values.get("token_dim")
    return SoftPromptConfig(
        tokens=int(values["num_virtual_tokens"]),
        width=None if width is None else int(width),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
