"""The configuration of soft prompts: what counts is read, labels are never opened."""

import socket
from pathlib import Path
from typing import Any

import pytest

from expertctl.package.peft_config import SoftPromptConfig
from tests.package.forged_packages import catch_config_error, parse_config_document
from tests.tensor_shapes import prompt_config

BASE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
KINDS = ("PROMPT_TUNING", "P_TUNING")


def written(kind: str = "PROMPT_TUNING", **changes: Any) -> dict[str, Any]:
    return prompt_config(Path("base"), BASE, kind=kind, tokens=5, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_is_how_many_tokens_and_how_wide(kind: str) -> None:
    config = parse_config_document(written(kind, revision="abc"))
    assert config == SoftPromptConfig(5, 32, "base", "abc")
    assert config.kind == "soft_prompt"


@pytest.mark.parametrize("width", [{}, {"token_dim": None}])
def test_the_width_may_be_left_to_the_tensor(width: dict[str, Any]) -> None:
    assert parse_config_document({"peft_type": "P_TUNING", "num_virtual_tokens": 5, **width}) == (
        SoftPromptConfig(5, None, None, None)
    )


@pytest.mark.parametrize(
    "place", ["/etc", "../../x", "https://169.254.169.254/latest", "gpt2", "file:///etc/passwd"]
)
def test_the_tokenizer_is_a_label_and_nothing_is_opened(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*args: object, **named: object) -> None:
        raise AssertionError((args, named))

    text = written(
        prompt_tuning_init="TEXT", prompt_tuning_init_text="hello", tokenizer_name_or_path=place
    )
    parse_config_document(written())  # reads the schema
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(socket, "socket", opened)
    assert parse_config_document(text) == SoftPromptConfig(5, 32, "base", None)


def test_integers_may_be_spelled_as_floats_as_json_allows() -> None:
    config = parse_config_document(written(num_virtual_tokens=5.0, token_dim=32.0))
    assert isinstance(config, SoftPromptConfig)
    assert (type(config.tokens), type(config.width)) == (int, int)


REFUSED: list[tuple[str, Any]] = [
    ("num_virtual_tokens", 0),
    ("num_virtual_tokens", -5),
    ("num_virtual_tokens", 10**9),
    ("num_virtual_tokens", 4.5),
    ("num_virtual_tokens", True),
    ("num_virtual_tokens", None),
    ("num_virtual_tokens", "5"),
    ("token_dim", 0),
    ("token_dim", 10**12),
    ("token_dim", "32"),
    ("num_transformer_submodules", 2),
    ("num_transformer_submodules", 0),
    ("modules_to_save", ["lm_head"]),
    ("tokenizer_kwargs", {"trust_remote_code": True}),
    ("tokenizer_kwargs", {"use_fast": False}),
    ("auto_mapping", {"base_model_class": "X", "parent_library": "subprocess"}),
    ("prompt_tuning_init", "FILE"),
    ("prompt_tuning_init", {"a": 1}),
    ("prompt_tuning_init_text", ["x"]),
    ("tokenizer_name_or_path", ["x"]),
    ("tokenizer_name_or_path", "x" * 5000),
    ("encoder_reparameterization_type", "TRANSFORMER"),
    ("encoder_hidden_size", -1),
    ("encoder_num_layers", "2"),
    ("encoder_dropout", 2),
    ("task_type", "SEQ_2_SEQ_LM"),
    ("task_type", "SEQ_CLS"),
    ("prefix_projection", True),
    ("num_ranks", 1),
    ("prompt_tuning_init_state_dict_path", "/etc/passwd"),
    ("num_tasks", 2),
    ("target_modules", ["q_proj"]),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_change_the_meaning_is_refused_by_name(
    kind: str, field: str, value: Any
) -> None:
    assert field in catch_config_error(written(kind, **{field: value}))


def test_why_tokenizer_settings_are_refused_is_said() -> None:
    message = catch_config_error(written(tokenizer_kwargs={"trust_remote_code": True}))
    assert "how a tokenizer is loaded" in message
