"""The configuration of a LoRA or a DoRA: PEFT as oracle, and refusals by name for the rest."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import parse_adapter_config
from expertctl.package.peft_config import LoraConfig, ModulePattern, find_layer
from expertctl.schema.validation import find_problems
from tests.tensor_shapes import ALL_PROJECTIONS, lora_config

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "adapter-config-lora"
MODULES = [
    f"model.layers.{layer}.{part}.{name}"
    for layer in (0, 1, 2, 10, 11)
    for part, name in [("self_attn", "q_proj"), ("self_attn", "o_proj"), ("mlp", "down_proj")]
] + ["lm_head", "model.embed_tokens", "layers.0.q_proj", "model.layersX0.self_attn.q_proj"]


def parse(**changes: Any) -> LoraConfig:
    values = lora_config(Path("base"), rank=4, alpha=8, targets=ALL_PROJECTIONS, **changes)
    config = parse_adapter_config(json.dumps(values).encode(), what="adapter_config.json")
    assert isinstance(config, LoraConfig)
    return config


def refused(**changes: Any) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        parse(**changes)
    return caught.value.message


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig

    written = PeftConfig(
        r=16,
        lora_alpha=32,
        use_rslora=True,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"q_proj": 8},
        alpha_pattern={"v_proj": 4},
        layers_to_transform=[0, 1],
        task_type="CAUSAL_LM",
        base_model_name_or_path="Qwen/Qwen3-0.6B",
        revision="abc",
    )
    written.save_pretrained(str(tmp_path))
    config = parse_adapter_config((tmp_path / "adapter_config.json").read_bytes(), what="x")
    assert isinstance(config, LoraConfig)
    assert (config.r, config.alpha, config.use_rslora) == (16, 32, True)
    assert set(config.target_modules or ()) == {"q_proj", "v_proj"}
    assert config.layers_to_transform == {0, 1}
    assert (config.base_label, config.base_revision) == ("Qwen/Qwen3-0.6B", "abc")


def test_every_field_that_peft_writes_has_its_place() -> None:
    from peft import LoraConfig as PeftConfig

    document = {k: list(v) if isinstance(v, set) else v for k, v in PeftConfig().to_dict().items()}
    assert find_problems(json.loads(json.dumps(document)), "adapter-config-lora") == []


def test_the_neutral_values_of_refused_fields_are_those_of_peft() -> None:
    from peft import LoraConfig as PeftConfig

    schema = json.loads((EXAMPLES.parents[1] / "adapter-config-lora.schema.json").read_text())
    defaults = PeftConfig().to_dict()
    refusable = {k: v["enum"] for k, v in schema["properties"].items() if "x-refused" in v}
    assert set(refusable) <= set(defaults)
    assert [k for k, neutral in refusable.items() if defaults[k] not in neutral] == []


@pytest.mark.parametrize(
    ("changes", "module", "scale"),
    [
        ({}, "model.layers.0.self_attn.q_proj", 2.0),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 4.0),
        ({"rank_pattern": {"q_proj": 16}}, "model.layers.0.self_attn.q_proj", 0.5),
        ({"rank_pattern": {"q_proj": 16}}, "model.layers.0.self_attn.k_proj", 2.0),
        ({"alpha_pattern": {"q_proj": 6.5}}, "model.layers.0.self_attn.q_proj", 1.625),
        (
            {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True},
            "model.layers.0.self_attn.q_proj",
            0.5,
        ),
    ],
)
def test_scales_are_those_of_the_papers(changes: dict[str, Any], module: str, scale: float) -> None:
    assert parse(**changes).scale_for(module) == scale


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_ranks_and_scales_are_those_that_peft_gives_its_layers(base_dir: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    fields: dict[str, Any] = {
        "rank_pattern": {
            "layers.1.self_attn.q_proj": 2,
            "q_proj": 3,
            "^model.layers.0.mlp.up_proj": 6,
        },
        "alpha_pattern": {"v_proj|o_proj": 5, "model.layers.1.mlp.down_proj": 1},
        "use_rslora": True,
        "layers_to_transform": [1],
    }
    targets = ["q_proj", "v_proj", "o_proj", "down_proj", "model.layers.0.mlp.up_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_dir),
        PeftConfig(r=4, lora_alpha=8, target_modules=targets, **fields),
    )
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "scaling")
    }
    config = parse(**fields, target_modules=targets)
    found = {n: (m.r["default"], m.scaling["default"]) for n, m in layers.items()}
    assert found == {
        n: (config.rank_for(n), pytest.approx(config.scale_for(n), rel=1e-12)) for n in layers
    }
    every = [n.removeprefix("base_model.model.") for n, _ in model.named_modules()]
    linear = [n for n in every if n.endswith("_proj")]
    assert {n for n in linear if config.adapts(n)} == set(layers)


KEYS = st.lists(
    st.from_regex(
        r"(\^|\.\*\\\.)?[a-z.]{0,3}(layers|q_proj|0|1)(\.[a-z0-9_]{1,6}){0,2}\$?", fullmatch=True
    ),
    min_size=1,
    max_size=2,
).map("|".join)


@given(KEYS, st.sampled_from(MODULES) | st.text(alphabet="ql.0_proj1", max_size=14))
@settings(deadline=None, max_examples=500)
def test_patterns_match_as_pefts_own_function(key: str, module: str) -> None:
    from peft.utils.other import get_pattern_key

    expected = get_pattern_key([key], module) == key
    if key != module:
        assert ModulePattern.parse(key).matches(module) == expected


@given(
    st.sampled_from(MODULES),
    st.lists(st.sampled_from(["q_proj", "down_proj", "mlp.down_proj", "lm_head"]), max_size=3),
    st.none() | st.sampled_from([0, 1, [0], [1, 10], []]),
    st.sampled_from([None, "", "layers", ["layers"], ["h", "layers"], ["model.layers"]]),
    st.none() | st.lists(st.sampled_from(["o_proj", "layers.1.self_attn.q_proj"]), max_size=2),
)
@settings(deadline=None, max_examples=400)
def test_targets_are_chosen_as_peft_chooses_them(
    module: str, targets: list[str], layers: Any, pattern: Any, excluded: list[str] | None
) -> None:
    from peft import LoraConfig as PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    fields = {
        "target_modules": targets or ["q_proj"],
        "layers_to_transform": layers,
        "layers_pattern": pattern if layers else None,
        "exclude_modules": excluded,
    }
    ours = parse(**fields).adapts(module)
    theirs = check_target_module_exists(PeftConfig(**fields), module)
    assert ours == (bool(theirs) and "Excluded" not in type(theirs).__name__)


def test_a_regex_for_the_targets_is_never_run() -> None:
    hostile = "(a+)+$" * 20
    config = parse(target_modules=hostile, exclude_modules=hostile)
    assert config.target_modules is None
    assert config.adapts("a" * 400 + "!")


@pytest.mark.parametrize("targets", ["all-linear", ".*_proj", None])
def test_without_literal_targets_the_tensors_decide(targets: str | None) -> None:
    assert parse(target_modules=targets).adapts("model.layers.0.self_attn.q_proj")


def test_integers_may_be_spelled_as_floats_as_json_allows() -> None:
    config = parse(r=4.0, rank_pattern={"q_proj": 2.0}, layers_to_transform=[1.0])
    ranks = [config.r, config.rank_for("a.q_proj")]
    assert (ranks, [type(rank) for rank in ranks]) == ([4, 2], [int, int])
    assert config.layers_to_transform == {1}


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+$", "(a|a)*", ".*", "a*", "a+", "a?", "[a-z]+", "a{1000}", "(?i)q", "\\d+",
        "q_proj(", "",
        "(.*a){20}", "a|", "^", "a\\Z", "(a|b)", "x" * 300 + "*", ".*\\.", ".*\\.^a", "^.*\\.a",
        ".*\\..*\\.a", "*a", "a.*\\.b",
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_key_that_is_a_regex_is_refused_by_name(key: str, field: str) -> None:
    assert field in refused(**{field: {key: 4}})


def test_matching_is_linear() -> None:
    pattern = ModulePattern.parse("|".join(["a.a.a.a"] * 100))
    assert not pattern.matches("a" * 500)


REFUSED: list[tuple[str, Any]] = [
    ("bias", "all"),
    ("bias", "lora_only"),
    ("lora_bias", True),
    ("use_dora", "yes"),
    ("alora_invocation_tokens", [1, 2]),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1]),
    ("trainable_token_indices", {"embed_tokens": [1]}),
    ("layer_replication", [[0, 4], [2, 5]]),
    ("target_parameters", ["mlp.experts"]),
    ("target_parameters", ["mlp.experts.gate_up_proj_bias"]),
    ("target_parameters", "mlp.experts.down_proj"),
    ("target_parameters", [".*down_proj"]),
    ("auto_mapping", {"base_model_class": "X", "parent_library": "subprocess"}),
    ("megatron_config", {"a": 1}),
    ("megatron_core", "os"),
    ("loftq_config", {"loftq_bits": 4}),
    ("corda_config", {}),
    ("lora_ga_config", {}),
    ("arrow_config", {"top_k": 2}),
    ("kasa_config", {}),
    ("monteclora_config", {}),
    ("velora_config", {}),
    ("use_bdlora", {}),
    ("use_qalora", True),
    ("ensure_weight_tying", True),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("task_type", "SEQ_CLS"),
    ("peft_type", "LOHA"),
    ("peft_type", "PREFIX_TUNING"),
    ("peft_type", "MULTITASK_PROMPT_TUNING"),
    ("peft_type", "ADALORA"),
    ("peft_type", "lora"),
    ("peft_type", ["LORA"]),
    ("peft_type", None),
    ("trust_remote_code", True),
    ("custom_code", "x"),
    ("tokenizer_name_or_path", "../x"),
    ("feedforward_modules", ["x"]),
    ("chat_template", "{{ x }}"),
    ("r", 0),
    ("r", -4),
    ("r", 10**9),
    ("r", 4.5),
    ("r", True),
    ("lora_alpha", 0),
    ("lora_alpha", -1),
    ("lora_alpha", "8"),
    ("lora_alpha", 10**9),
    ("lora_dropout", 2),
    ("use_rslora", "yes"),
    ("fan_in_fan_out", 1),
    ("target_modules", []),
    ("target_modules", ["(a+)+"]),
    ("target_modules", [5]),
    ("target_modules", {"a": 1}),
    ("layers_to_transform", [-1]),
    ("layers_to_transform", "0"),
    ("layers_pattern", "(a+)+$"),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": "4"}),
    ("alpha_pattern", {"q_proj": -1}),
    ("base_model_name_or_path", ["x"]),
    ("inference_mode", "no"),
    ("qalora_group_size", 0),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_change_the_meaning_is_refused_by_name(field: str, value: Any) -> None:
    assert field in refused(**{field: value})


def test_a_huge_pattern_is_not_repeated_in_the_message() -> None:
    assert len(refused(rank_pattern={"k" * 100_000: 0, "l" * 100_000: 4})) < 2000


def test_all_problems_are_named_at_once() -> None:
    message = refused(bias="all", use_qalora=True, unknown=1, r=0)
    assert all(name in message for name in ("bias", "use_qalora", "unknown", "r: "))


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_a_missing_field_is_named(name: str) -> None:
    values = lora_config(Path("b"), rank=4, alpha=8, targets=("q_proj",))
    del values[name]
    with pytest.raises(InvalidPackageError, match=name):
        parse_adapter_config(json.dumps(values).encode(), what="x")


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "1e999"])
def test_an_alpha_that_is_no_number_is_refused(alpha: str) -> None:
    text = f'{{"peft_type": "LORA", "r": 4, "lora_alpha": {alpha}}}'
    with pytest.raises(InvalidPackageError):
        parse_adapter_config(text.encode(), what="x")


@pytest.mark.parametrize(
    "label",
    [
        "/etc",
        "../../secret",
        "https://169.254.169.254/latest",
        "file:///etc/passwd",
        "a/b",
        "\\\\s\\x",
    ],
)
def test_the_name_of_the_base_is_a_label_and_nothing_is_opened(label: str) -> None:
    assert parse(base_model_name_or_path=label).base_label == label


@given(st.binary(max_size=100))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_adapter_config(data, what="x")


def test_layers_are_found_in_names() -> None:
    assert find_layer("model.layers.7.self_attn.q_proj", ()) == 7
    assert find_layer("model.layers.7.experts.3.up_proj", ()) == 7
    assert find_layer("layers.7.q_proj", ()) is None
    assert find_layer("layers.7.q_proj", ("layers",)) == 7
    assert find_layer("lm_head", ()) is None


NESTED = [
    "model.layers.1.h.2.q_proj",
    "h.1.layers.2.q_proj",
    "layers.1.q_proj",
    "model.layers.1",
    "my_layers.1.q_proj",
    "layers.x.layers.2.q_proj",
    "a.1.2.3.q_proj",
    "1.2.3.q_proj",
]


@pytest.mark.parametrize("module", NESTED)
@pytest.mark.parametrize("patterns", [(), ("layers",), ("h", "layers"), ("layers", "h"), ("a.1",)])
def test_the_number_of_a_layer_is_the_one_that_peft_finds(
    module: str, patterns: tuple[str, ...]
) -> None:
    from peft import LoraConfig as PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    for layer in range(4):
        config = PeftConfig(
            target_modules=["q_proj", "1"],
            layers_to_transform=[layer],
            layers_pattern=list(patterns) or None,
        )
        assert bool(check_target_module_exists(config, module)) == (
            find_layer(module, patterns) == layer
        )


def test_finding_layers_takes_no_long_time_whatever_their_names() -> None:
    patterns = tuple("a." * 250 + f"b{number:02d}" for number in range(100))
    for number in range(20):
        assert find_layer("1." * 250 + f"{number}.q_proj", patterns) is None
        assert find_layer("a." * 250 + f"{number}.q_proj", patterns) is None
