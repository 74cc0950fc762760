"""A home to serve from: a base in the shape of Qwen3-0.6B and experts for it, random weights.

The base is in bfloat16 with the byte-level tokenizer of the starter base; each expert is a bfloat16
rank-16 LoRA on all seven projections, signed and installed like any other. Each has a subject, so
that prompts can be routed. All sampled tokens are spelled as numbers, so that an answer is JSON
although the weights are random.

There is also a base with random weights in the shape of SmolLM2-135M, whose text tokens are bytes.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.inputs import HIDDEN, PROJECTIONS, RANK, VOCABULARY, list_module_shapes
from benchmarks.prefix import write_base
from expertctl.install.installer import STARTER, InstallContext, install_files
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.model_config import parse_model_config
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore

BASE = "qwen3-0.6b-shape"
SPREAD = 0.01
SUBJECTS = (
    ("sql", "Write SQL queries for databases", "an SQL query that counts the orders of a customer"),
    ("recipes", "Cook meals from recipes", "a recipe for tomato soup with fresh basil"),
    ("travel", "Plan trips and itineraries", "an itinerary for a trip of three days to Lisbon"),
    ("contracts", "Draft clauses of contracts", "a clause of a contract about termination"),
    ("chess", "Analyse chess positions", "the best chess opening against the queen's gambit"),
    ("astronomy", "Explain planets and stars", "an explanation of the orbits of Jupiter's moons"),
    ("gardening", "Grow plants in gardens", "a schedule for pruning roses in the garden"),
    ("fitness", "Plan workouts and training", "a workout that trains for a half marathon"),
    ("poetry", "Write poems in verse", "a poem of two verses about the autumn sea"),
    ("taxes", "Fill in tax returns", "the deductions of a tax return for a home office"),
    ("biology", "Explain cells and genes", "an explanation of how a cell copies its genes"),
    ("music", "Compose chords and melodies", "a melody over chords in the key of D minor"),
    ("weather", "Forecast the weather", "a weather forecast with rain, wind and storms"),
    ("football", "Report on football matches", "a report of a football match with three goals"),
    ("welding", "Weld steel and aluminium", "the electrodes for welding a steel frame"),
    ("insurance", "Settle insurance claims", "a letter that settles an insurance claim"),
)
"""Keyword, description and question: one of each for every expert that can be measured."""


def make_serving_home(root: Path, scratch: Path, *, experts: int) -> Home:
    """Make a home with the base and so many experts; ``scratch`` is for temporary files."""
    home, base_dir = Home(root / "home"), write_base(scratch / "base")
    first = give_text_to_all_tokens(base_dir / "tokenizer.json")
    _scale_embeddings(base_dir / "model.safetensors", tokens=first)
    bases, trust = BaseStore(home.bases), TrustStore(home.trust)
    bases.add(base_dir, name=BASE)
    key = PrivateKey.generate("ed25519")
    trust.add(key.public, name="bench", namespaces=["bench"])
    facts = read_base(base_dir)
    for number in range(experts):
        package = _write_package(scratch / f"expert-{number}", number, facts, key)
        install_files([package], InstallContext(Store(home.store), bases, trust, home.registries))
        package.unlink()
    return home


def make_expert_name(number: int) -> str:
    """Return the name of an expert."""
    return f"bench/expert-{number}"


def make_question(number: int) -> str:
    """Return a question for the expert of this number."""
    return f"Please give me {SUBJECTS[number % len(SUBJECTS)][2]}"


def give_text_to_all_tokens(path: Path, *, vocabulary: int = VOCABULARY) -> int:
    """Spell the tokens beyond bytes as numbers: the text is readable, and JSON as a whole.

    Returns the id of the first of these.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    first: int = 1 + max(added["id"] for added in tokenizer["added_tokens"])
    known.update({str(number): number for number in range(first, vocabulary)})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return first


def _scale_embeddings(path: Path, *, tokens: int) -> None:
    """Halve the embeddings of the first tokens, so that other tokens are sampled.

    The logits are computed with the embedding too, and its rows repeat: each halved row has copies
    that are not halved.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        begin = 8 + length + header["model.embed_tokens.weight"]["data_offsets"][0]
        file.seek(begin)
        rows = bytearray(file.read(tokens * HIDDEN * torch.bfloat16.itemsize))
        torch.frombuffer(rows, dtype=torch.bfloat16).div_(2)
        file.seek(begin)
        file.write(rows)


def _write_package(folder: Path, number: int, facts: BaseFacts, key: PrivateKey) -> Path:
    folder.mkdir()
    adapter, package = folder / "adapter", folder.with_suffix(".expert")
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    save_file(dict(_make_tensors(number)), weights, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name in PROJECTIONS),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    keyword, description, asked = SUBJECTS[number % len(SUBJECTS)]
    routing = {"keywords": [keyword], "examples": [f"Write {asked}", f"I need {asked}"]}
    (adapter / MANIFEST_PATH).write_text(json.dumps({"routing": routing}))
    overrides = ManifestOverrides(
        name=make_expert_name(number), version="1.0.0", description=description
    )
    build_package(plan_build(adapter, overrides, base=facts), package, key=key)
    weights.unlink()
    return package


def _make_tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    for module, (out, into) in list_module_shapes().items():
        name = f"base_model.model.{module}"
        for part, shape in (("A", (RANK, into)), ("B", (out, RANK))):
            numbers = torch.randn(shape, generator=drawn) * SPREAD
            yield f"{name}.lora_{part}.weight", numbers.bfloat16()


SMALL_CONFIG: JsonObject = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
SMALL_SPREAD, SMALL_SEED = 0.02, 0


def write_small_base(directory: Path) -> Path:
    """Write the base, with the byte-level tokenizer of the starter base."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SMALL_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STARTER / "base" / name, directory / name)
    config = parse_model_config(SMALL_CONFIG)
    give_text_to_all_tokens(directory / "tokenizer.json", vocabulary=config.vocab_size)
    drawn = torch.Generator().manual_seed(SMALL_SEED)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.randn(shape, generator=drawn).mul(SMALL_SPREAD).bfloat16()
        for name, shape in config.tensor_shapes().items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
