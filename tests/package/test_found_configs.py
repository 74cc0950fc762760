"""Configurations as they lie around: what has no effect is left out, everything else is named.

PEFT is the oracle: with a field that is left out it gives the very numbers that it gives without.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import (
    find_full_precision_label,
    is_neutral,
    parse_adapter_config,
    read_source_config,
)
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import BuildPlan, build_package, plan_build
from expertctl.package.draft import ManifestOverrides, find_base_problems
from expertctl.package.read import read_package
from tests.tensor_shapes import lora_config

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
CONFIG = "adapter_config.json"
Numbers = Callable[[Path], list[float]]
UNSLOTH = {
    "base_model_class": "Qwen2ForCausalLM",
    "parent_library": "transformers.models.qwen2.modeling_qwen2",
    "unsloth_fixed": True,
}
NEUTRAL: dict[str, dict[str, Any]] = {
    "the fields of PEFT 0.2": {"enable_lora": None, "merge_weights": False},
    "a class that unsloth names": {"auto_mapping": UNSLOTH},
    "a class that is not installed": {
        "auto_mapping": {"base_model_class": "X", "parent_library": "os.nothing"}
    },
    "fan_in_fan_out is null": {"fan_in_fan_out": None},
    "use_rslora is null": {"use_rslora": None},
    "inference_mode is null": {"inference_mode": None},
    "qalora_group_size is null": {"qalora_group_size": None},
    "runtime_config": {"runtime_config": {"ephemeral_gpu_offload": False}},
    "megatron_config is empty": {"megatron_config": {}},
    "megatron_core is empty": {"megatron_core": ""},
    "no tokens invoke aLoRA": {"alora_invocation_tokens": []},
    "corda_config is empty": {"corda_config": {}},
    "lora_ga_config is empty": {"lora_ga_config": {}},
    "velora_config is empty": {"velora_config": {}},
    "monteclora_config is empty": {"monteclora_config": {}},
    "MiCA began it": {"init_lora_weights": "mica"},
    "features are its task": {"task_type": "FEATURE_EXTRACTION"},
    "sequences are its task": {"task_type": "SEQ_2_SEQ_LM"},
    "fields of a later PEFT": {
        "new_config": None,
        "use_new": False,
        "new_size": 0,
        "new_rate": 0.0,
        "new_name": "",
        "new_list": [],
        "new_table": {},
    },
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "PiSSA and others were off": {"init_lora_weights": True, "use_dora": None},
    "no module is saved whole": {"modules_to_save": []},
    "EVA began it": {"init_lora_weights": "eva", "eva_config": {}},
    "no layer is repeated": {"layer_replication": []},
    "alpha is a float": {"lora_alpha": 6.0},
    "QALoRA is off": {"use_qalora": None, "lora_bias": None},
    "an empty revision": {"revision": ""},
}
"""What the strict reader itself takes."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fused projections": ({"enable_lora": [True, False, True]}, "enable_lora = [true, false"),
    "another name of alpha": ({"alpha": 16}, "alpha = 16"),
    "a later variant": ({"use_new": True}, "use_new = true"),
    "biases were trained": ({"bias": "all"}, 'bias = "all" is not supported'),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights = "pissa_niter_4"'),
    "OLoRA": ({"init_lora_weights": "olora"}, 'init_lora_weights = "olora"'),
    "KaSA, though empty": ({"kasa_config": {}}, "kasa_config = {}"),
    "BD-LoRA, though empty": ({"use_bdlora": {}}, "use_bdlora = {}"),
    "Megatron": ({"megatron_config": {"a": 1}}, 'megatron_config = {"a": 1}'),
    "aLoRA": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens = [5]"),
    "a classifier": ({"task_type": "SEQ_CLS"}, 'task_type = "SEQ_CLS"'),
    "a head of its own": ({"modules_to_save": ["score"]}, 'modules_to_save = ["score"]'),
    "norms": ({"modules_to_save": ["lm_head", "norm"]}, 'modules_to_save = ["lm_head", "norm"]'),
}


def document(**changes: Any) -> dict[str, Any]:
    values = lora_config(Path("x"), rank=4, alpha=6, targets=("q_proj", "down_proj"))
    return {**values, "base_model_name_or_path": "acme/tiny", **changes}


def found(**changes: Any) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """What is packed, ``None`` for the file itself, and what is said."""
    read = read_source_config(json.dumps(document(**changes)).encode(), what=CONFIG)
    return None if read.packed_bytes is None else json.loads(read.packed_bytes), read.notes


def refused(**changes: Any) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        found(**changes)
    return caught.value.message


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, base_dir: Path) -> Path:
    """A LoRA with random numbers, as PEFT saved it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("found") / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base, config).save_pretrained(str(folder))
    (folder / "README.md").unlink()
    return folder


@pytest.fixture(scope="module")
def numbers(base_dir: Path) -> Numbers:
    """The scores after a few tokens, of the base with an adapter that PEFT loaded."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def numbers(adapter: Path) -> list[float]:
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(base, str(adapter)).eval()
            scores: list[float] = (
                model(input_ids=torch.tensor([[1, 5, 9, 2]])).logits[0, -1].tolist()
            )
        return scores

    return numbers


def copy_with(saved: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(saved, target)
    config = json.loads((target / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps({**config, **changes}))
    return target


def planned(directory: Path, facts: BaseFacts) -> BuildPlan:
    return plan_build(directory, ManifestOverrides(), base=facts)


@pytest.fixture(scope="module")
def expected(saved: Path, numbers: Numbers) -> list[float]:
    """What PEFT gives for the adapter as it was saved."""
    return numbers(saved)


@pytest.mark.parametrize("case", NEUTRAL | ACCEPTED)
def test_a_field_without_an_effect_is_packed_as_peft_would_load_it(
    case: str,
    saved: Path,
    numbers: Numbers,
    expected: list[float],
    facts: BaseFacts,
    tmp_path: Path,
) -> None:
    changes = (NEUTRAL | ACCEPTED)[case]
    directory = copy_with(saved, tmp_path / "a", base_model_name_or_path="acme/tiny", **changes)
    found = json.loads((directory / CONFIG).read_text())
    assert numbers(directory) == expected
    plan = planned(directory, facts)
    package = read_package(build_package(plan, tmp_path / "a.expert").path)
    left_out = changes if case in NEUTRAL else {}
    kept = {field: value for field, value in found.items() if field not in left_out}
    assert json.loads(package.small[CONFIG]) == kept
    assert len(plan.notes) == (1 if left_out else 0)
    assert all(field in plan.notes[0] for field in left_out)


def test_an_own_configuration_is_packed_byte_by_byte() -> None:
    assert found() == (None, ())


def test_what_is_left_out_is_said_in_one_line() -> None:
    packed, notes = found(enable_lora=None, merge_weights=False, auto_mapping=UNSLOTH)
    assert notes == (
        "left out of the package, because they have no effect: auto_mapping (a label), "
        "enable_lora (unknown, null), merge_weights (unknown, false)",
    )
    assert packed == {key: value for key, value in document().items() if key != "auto_mapping"}


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4},
        {"peft_type": "P_TUNING", "num_virtual_tokens": 4},
    ],
    ids=lambda config: str(config["peft_type"]),
)
def test_the_other_kinds_lose_what_has_no_effect_too(config: dict[str, Any]) -> None:
    noise = {"auto_mapping": UNSLOTH, "inference_mode": None, "new": False}
    read = read_source_config(json.dumps({**config, **noise}).encode(), what=CONFIG)
    assert read.packed_bytes is not None
    assert json.loads(read.packed_bytes) == config
    with pytest.raises(InvalidPackageError, match="new = true"):
        read_source_config(json.dumps({**config, "new": True}).encode(), what=CONFIG)


def test_a_tokenizer_on_the_machine_that_trained_a_prompt_is_not_packed() -> None:
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}
    named = {**config, "tokenizer_name_or_path": "/home/me/tokenizer"}
    read = read_source_config(json.dumps(named).encode(), what=CONFIG)
    assert read.packed_bytes is not None
    assert json.loads(read.packed_bytes) == {**config, "tokenizer_name_or_path": None}


def test_a_path_on_the_machine_that_trained_it_is_not_packed() -> None:
    for path in ("/home/me/models/llama", "C:\\models\\llama", "../llama", "./llama"):
        packed, notes = found(base_model_name_or_path=path)
        assert packed == document(base_model_name_or_path=None)
        assert notes == ("left out of the package: base_model_name_or_path, a path",)


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_with_a_meaning_is_refused_by_name_and_once(case: str) -> None:
    changes, message = REFUSED[case]
    said = refused(**changes)
    assert message in said
    assert all(said.count(f"{field} = ") == 1 for field in changes)
    assert all(f"{field}: " not in said.replace("adapter_config.json: ", "") for field in changes)


def test_all_that_is_refused_is_said_at_once() -> None:
    said = refused(bias="all", alpha=16, use_new=True, r=0, lora_alpha="x", enable_lora=None)
    for part in ("bias =", "alpha = 16", "use_new = true", "r: 0", 'lora_alpha: "x"'):
        assert part in said
    assert "enable_lora" not in said


def test_what_an_adapter_calls_its_fields_and_its_base_stays_in_its_line() -> None:
    _, notes = found(**{"x\nerror: y": False})
    assert notes == (
        "left out of the package, because they have no effect: x error: y (unknown, false)",
    )
    assert 'x error: y = "z"; ' in refused(**{"x\nerror: y": "z"})
    (problem,) = find_base_problems({"base": {"name": f"x\nhint: {'y' * 5000}"}})
    assert "\n" not in problem
    assert len(problem) < 400


def test_fields_with_the_same_fault_are_all_named() -> None:
    said = refused(use_rslora="yes", fan_in_fan_out="yes", inference_mode="yes")
    for field in ("use_rslora", "fan_in_fan_out", "inference_mode"):
        assert f'{field}: "yes" is not' in said


def test_the_configuration_of_a_model_that_was_merged_in_is_one_line() -> None:
    model = {"hidden_size": 2048, "model_type": "llama", "rope_scaling": None, "vocab_size": 32000}
    assert refused(**model) == (
        f"{CONFIG}: not known here, and not neutral: hidden_size = 2048, "
        'model_type = "llama", vocab_size = 32000; remove what the adapter does not need'
    )


def test_thousands_of_fields_are_not_all_printed() -> None:
    said = refused(**{f"field_{i}\x1b[31m": i + 1 for i in range(5000)})
    assert "and 4990 more" in said
    assert len(said) < 3000
    _, notes = found(**{f"field_{i}{'x' * 900}": None for i in range(900)})
    assert "and 880 more" in notes[0]
    assert len(notes[0]) < 3000


def test_a_package_holds_no_field_that_the_strict_reader_does_not_take() -> None:
    for changes in NEUTRAL.values():
        read = read_source_config(json.dumps(document(**changes)).encode(), what=CONFIG)
        assert read.packed_bytes is not None
        parse_adapter_config(read.packed_bytes, what=CONFIG)
        with pytest.raises(InvalidPackageError):
            parse_adapter_config(json.dumps(document(**changes)).encode(), what=CONFIG)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "a", "/x", "gaussian"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from([*document(), "enable_lora", "runtime_config", "new"])


@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_any_configuration_is_refused_or_packed_as_the_strict_reader_takes_it(
    changes: dict[str, Any],
) -> None:
    data = json.dumps(document(**changes)).encode()
    try:
        read = read_source_config(data, what=CONFIG)
    except InvalidPackageError:
        return
    packed = data if read.packed_bytes is None else read.packed_bytes
    strict = parse_adapter_config(packed, what=CONFIG)
    assert replace(read.config, base_label=None) == replace(strict, base_label=None)
    assert read_source_config(packed, what=CONFIG).packed_bytes is None


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_null_false_zero_and_empty_are_neutral(value: Any) -> None:
    assert is_neutral(value)


@pytest.mark.parametrize("value", [True, 1, -1, 1e-300, " ", "false", "None", [None], {"a": None}])
def test_everything_else_is_not(value: Any) -> None:
    assert not is_neutral(value)


def test_false_is_no_zero_for_a_field_that_is_known() -> None:
    assert "r: false" in refused(r=False)
    assert "fan_in_fan_out: 0" in refused(fan_in_fan_out=0)
    assert "rank_pattern: []" in refused(rank_pattern=[])


def test_what_must_be_there_may_not_be_null() -> None:
    said = refused(r=None, lora_alpha=None)
    assert "r: null" in said
    assert "lora_alpha: null" in said


@pytest.mark.parametrize(
    ("label", "base"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", "unsloth/llama-3-8b"),
        ("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit", "unsloth/Llama-3.2-3B-Instruct"),
        ("acme/tiny-bnb-8bit", "acme/tiny"),
        ("acme/tiny", None),
        ("acme/tiny-4bit", None),
        ("mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen3-0.6B"),
        ("mlx-community/Qwen3-0.6B-bf16", "mlx-community/Qwen3-0.6B"),
        ("acme/Qwen3-0.6B-4bit", None),
        ("-bnb-4bit", None),
    ],
)
def test_a_quantised_copy_stands_for_its_base(label: str, base: str | None) -> None:
    assert find_full_precision_label(label) == base
