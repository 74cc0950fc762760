"""Random models of transformers and adapters that PEFT itself made for them and saved."""

import copy
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.trust.keys import PrivateKey
from tests.engine.conftest import randomise_parameters
from tests.factories import BYTE_TOKENS, VOCAB, write_tokenizer

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
}
_GROUPED = {"num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 96,
            "scale_attn_by_inverse_layer_idx": True,  # our decoder does not run it
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", _SIZES),
    "opt": (
        "OPTConfig",
        {
            **{k: v for k, v in _SIZES.items() if k != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        },
    ),
    "phi": ("PhiConfig", _SIZES),
    "gemma": ("GemmaConfig", {**_SIZES, **_GROUPED, "head_dim": 8}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaConfig", {**_SIZES, **_GROUPED}),
    "mistral": ("MistralConfig", {**_SIZES, **_GROUPED, "sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {**_SIZES, **_GROUPED}),
    "qwen3": ("Qwen3Config", {**_SIZES, **_GROUPED, "head_dim": 8}),
}
_GPT_SIZES = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
_HYBRID = {**_SIZES, **_GROUPED, "head_dim": 8, "sliding_window": 8}
MORE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "codegen": ("CodeGenConfig", {**_GPT_SIZES, "rotary_dim": 4}),
    "cohere": ("CohereConfig", {**_SIZES, **_GROUPED}),
    "falcon": (
        "FalconConfig",
        {k: v for k, v in _SIZES.items() if k != "intermediate_size"},
    ),
    "gemma2": ("Gemma2Config", _HYBRID),
    "gemma3_text": ("Gemma3TextConfig", _HYBRID),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT_SIZES),
    "gptj": ("GPTJConfig", {**_GPT_SIZES, "rotary_dim": 4}),
    "mixtral": ("MixtralConfig", {**_SIZES, **_GROUPED, "num_local_experts": 4}),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 96},
    ),
    "olmo2": ("Olmo2Config", {**_SIZES, **_GROUPED}),
    "phi3": ("Phi3Config", {**_SIZES, **_GROUPED}),
    "stablelm": ("StableLmConfig", {**_SIZES, **_GROUPED}),
    "starcoder2": ("Starcoder2Config", {**_SIZES, **_GROUPED}),
}
"""Architectures beyond those of every test."""
TARGETS: dict[str, tuple[list[str], list[str]]] = {  # all, those before which IA³ scales
    "gpt2": (["c_attn", "mlp.c_proj", "c_fc"], ["mlp.c_proj"]),
    "gpt_neox": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "opt": (["q_proj", "v_proj", "fc2"], ["fc2"]),
    "phi": (["q_proj", "dense", "fc2"], ["fc2"]),
    "gemma": (["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "bloom": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "codegen": (["qkv_proj", "fc_out"], ["fc_out"]),
    "falcon": (["query_key_value"], []),
    "gpt_bigcode": (["c_attn", "c_fc"], []),
    "gptj": (["q_proj", "fc_out"], ["fc_out"]),
    "mixtral": (["q_proj", "v_proj"], []),
    "mpt": (["Wqkv", "down_proj"], ["down_proj"]),
    "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
    "starcoder2": (["q_proj", "c_proj"], ["c_proj"]),
    **{
        name: (["q_proj", "v_proj", "down_proj"], ["down_proj"])
        for name in (*NATIVE, "cohere", "gemma2", "gemma3_text", "olmo2", "stablelm")
    },
}
KINDS = ("lora", "patterns", "dora", "ia3", "prompt_tuning", "p_tuning")


@dataclass
class CompatModel:
    """A random model and the directory that it was saved to."""

    arch: str
    directory: Path
    model: Any
    adapters: dict[str, Path] = field(default_factory=dict)

    @property
    def read_facts(self) -> BaseFacts:
        """What a build reads of it."""
        return read_base(self.directory)

    def get_adapter(self, kind: str) -> Path:
        """The directory of an adapter of some kind, as PEFT saved it."""
        if kind not in self.adapters:
            folder = self.directory.parent / f"{self.arch}-{kind}"
            self.adapters[kind] = write_adapter(self, kind, folder)
        return self.adapters[kind]

    def load_adapted(self, kind: str) -> Any:
        """The model with that adapter, loaded by PEFT."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(
                copy.deepcopy(self.model), str(self.get_adapter(kind))
            )
        return loaded.eval()

    def generate(self, kind: str | None, ids: list[int], tokens: int) -> list[int]:
        """Greedy tokens as transformers generates them."""
        model = self.model if kind is None else self.load_adapted(kind)
        options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = torch.tensor([ids])
            mask = torch.ones_like(inputs)
            out = model.generate(
                input_ids=inputs, attention_mask=mask, eos_token_id=None, **options
            )
        found: list[int] = out[0].tolist()
        return found[-tokens:]

    def make_package(
        self,
        kind: str,
        folder: Path,
        *,
        name: str = "acme/sql",
        key: PrivateKey | None = None,
        **manifest: Any,
    ) -> Path:
        """A package of that adapter, signed where there is a key."""
        source = copy_adapter(self.get_adapter(kind), folder / name.replace("/", "-"))
        document = {"name": name, "version": "1.0.0", "description": "An example.", **manifest}
        document.setdefault("license", "MIT")
        (source / "expert.json").write_text(json.dumps(document))
        plan = plan_build(source, ManifestOverrides(), base=self.read_facts)
        return build_package(plan, folder / f"{name.replace('/', '-')}.expert", key=key).path


def copy_adapter(adapter: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_bytes((adapter / name).read_bytes())
    return target


def write_model(folder: Path, arch: str, *, seed: int = 0, **changes: Any) -> CompatModel:
    """Save a random model with a byte-level tokenizer."""
    name, values = {**CONFIGS, **MORE_CONFIGS}[arch]
    special = {"bos_token_id": BYTE_TOKENS, "eos_token_id": BYTE_TOKENS + 2, "pad_token_id": None}
    config = getattr(transformers, name)(**{**values, **special, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise_parameters(model, seed)
    model.tie_weights()
    directory = folder / arch
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return CompatModel(arch, directory, model)


def write_adapter(base: CompatModel, kind: str, folder: Path, *, seed: int = 1) -> Path:
    """Make an adapter with PEFT, give it random values, and save it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base.model), make_peft_config(base.arch, kind))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator) * 0.3
                    grow = any(word in name for word in ("ia3", "magnitude"))
                    parameter.copy_(parameter * (1 + noise) if grow else noise)
        model.save_pretrained(folder)
    return folder


def make_peft_config(arch: str, kind: str) -> Any:
    """The configuration of an adapter of some kind for some architecture."""
    modules, inputs = TARGETS[arch]
    task = "CAUSAL_LM"
    match kind:
        case "lora":
            return peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type=task)
        case "patterns":
            return peft.LoraConfig(
                r=4,
                lora_alpha=6,
                use_rslora=True,
                rank_pattern={modules[-1]: 2},
                alpha_pattern={modules[0]: 5},
                target_modules=modules,
                task_type=task,
            )
        case "dora":
            return peft.LoraConfig(
                r=4, lora_alpha=8, use_dora=True, target_modules=modules, task_type=task
            )
        case "ia3":
            return peft.IA3Config(
                target_modules=modules, feedforward_modules=inputs, task_type=task
            )
        case "prompt_tuning":
            return peft.PromptTuningConfig(num_virtual_tokens=5, task_type=task)
        case _:
            return peft.PromptEncoderConfig(
                num_virtual_tokens=5, encoder_hidden_size=16, task_type=task
            )
