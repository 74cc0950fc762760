"""adapter_config.json of every type: what PEFT writes has its place, all else is refused."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import parse_adapter_config
from expertctl.schema.validation import find_problems
from tests.package.forged_packages import catch_config_error, parse_config_document

SCHEMAS = Path(__file__).parents[2] / "schemas"
TYPES = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING")


def schema_name(peft_type: str) -> str:
    names = {"LORA": "lora", "IA3": "ia3"}
    return f"adapter-config-{names.get(peft_type, 'prompt')}"


def defaults(peft_type: str) -> dict[str, Any]:
    """What PEFT writes for a configuration with nothing set."""
    from peft import IA3Config, LoraConfig, PromptEncoderConfig, PromptTuningConfig

    config = {
        "LORA": LoraConfig,
        "IA3": IA3Config,
        "PROMPT_TUNING": PromptTuningConfig,
        "P_TUNING": PromptEncoderConfig,
    }[peft_type]()
    values = config.to_dict()
    return {k: v.value if isinstance(v, Enum) else v for k, v in values.items()}


@pytest.mark.parametrize("peft_type", TYPES)
def test_every_field_that_peft_writes_has_its_place(peft_type: str) -> None:
    document = {"num_virtual_tokens": 4, **{k: v for k, v in defaults(peft_type).items() if v}}
    fields = json.loads((SCHEMAS / f"{schema_name(peft_type)}.schema.json").read_text())
    assert set(defaults(peft_type)) <= set(fields["properties"])
    if schema_name(peft_type) != "adapter-config-prompt":
        del document["num_virtual_tokens"]
    assert find_problems(json.loads(json.dumps(document)), schema_name(peft_type)) == []


@pytest.mark.parametrize("peft_type", TYPES)
def test_the_neutral_values_of_refused_fields_are_those_of_peft(peft_type: str) -> None:
    schema = json.loads((SCHEMAS / f"{schema_name(peft_type)}.schema.json").read_text())
    written = defaults(peft_type)
    refusable = {k: v["enum"] for k, v in schema["properties"].items() if "x-refused" in v}
    assert "modules_to_save" in refusable
    assert {k for k, neutral in refusable.items() if written.get(k) not in neutral} == set()


@pytest.mark.parametrize("peft_type", TYPES)
def test_no_field_is_allowed_that_peft_does_not_write(peft_type: str) -> None:
    schema = json.loads((SCHEMAS / f"{schema_name(peft_type)}.schema.json").read_text())
    same_schema = [name for name in TYPES if schema_name(name) == schema_name(peft_type)]
    written = {field for name in same_schema for field in defaults(name)}
    assert set(schema["properties"]) == written


def test_every_other_type_of_peft_is_refused_by_name() -> None:
    from peft import PeftType

    others = [kind.value for kind in PeftType if kind.value not in TYPES]
    assert {"PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "LOHA", "LOKR", "OFT", "ADALORA"} < set(
        others
    )
    for other in others:
        assert f'peft_type: "{other}" is not supported' in catch_config_error({"peft_type": other})


@pytest.mark.parametrize("kind", [None, 1, [], {}, "", "lora", "Lora ", "x" * 1000, ["LORA"]])
def test_a_type_that_is_none_is_refused(kind: Any) -> None:
    message = catch_config_error({"peft_type": kind, "r": 4, "lora_alpha": 8})
    assert "peft_type" in message
    assert len(message) < 300


def test_a_missing_type_is_named() -> None:
    assert "peft_type is missing" in catch_config_error({})


@pytest.mark.parametrize("peft_type", TYPES)
@pytest.mark.parametrize(
    "field",
    [
        "trust_remote_code",
        "custom_code",
        "chat_template",
        "prefix_projection",
        "num_ranks",
        "token_ids",
        "x-note",
    ],
)
def test_a_field_that_peft_does_not_write_is_refused_by_name(peft_type: str, field: str) -> None:
    document = {"peft_type": peft_type, "num_virtual_tokens": 4, "r": 4, "lora_alpha": 8}
    assert field in catch_config_error({**document, field: True})


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING", "P_TUNING"])
def test_the_fields_of_one_type_are_refused_in_another(kind: str) -> None:
    assert "use_dora" in catch_config_error({"peft_type": kind, "use_dora": True})


@given(st.binary(max_size=100))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_adapter_config(data, what="x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    sorted(
        {
            field
            for name in ("lora", "ia3", "prompt")
            for field in json.loads(
                (SCHEMAS / f"adapter-config-{name}.schema.json").read_text(encoding="utf-8")
            )["properties"]
        }
        - {"peft_type"}
    )
)


@given(st.sampled_from(TYPES), st.dictionaries(FIELDS, JSON, max_size=4))
@settings(deadline=None, max_examples=300)
def test_any_values_are_read_or_refused(peft_type: str, fields: dict[str, Any]) -> None:
    needed = {
        "LORA": {"r": 4, "lora_alpha": 8},
        "IA3": {},
        "PROMPT_TUNING": {"num_virtual_tokens": 4},
        "P_TUNING": {"num_virtual_tokens": 4},
    }
    document = {"peft_type": peft_type, **needed[peft_type], **fields}
    try:
        config = parse_config_document(document)
    except InvalidPackageError:
        return
    assert config.kind in {"lora", "dora", "ia3", "soft_prompt"}
    assert config.base_label == fields.get("base_model_name_or_path")
