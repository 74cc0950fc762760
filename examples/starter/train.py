"""Train the experts on a base: `python -m examples.starter.train --base DIR --out DIR`."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from examples.starter.experts import EXPERTS
from examples.starter.fitting import Schedule, encode, fit, prepare
from examples.starter.kinds import Dora, Ia3, Kind, Lora, SoftPrompt
from examples.starter.samples import BATCH, Task, training_set
from examples.starter.vocab import encode_system

PEAK = 4e-3
PEAK_OF_FEW = 2e-2
"""For IA³ and soft prompts, which have few weights."""
WARMUP = 20
BASE_NAME = "starter/base"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEED_FORWARD = ["down_proj"]


def load_base(folder: Path) -> Qwen3ForCausalLM:
    """The saved weights, computed in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def attach(base: Qwen3ForCausalLM, kind: Kind) -> PeftModel:
    """The base with an adapter that changes nothing yet, or that says what its start says."""
    model = get_peft_model(base, adapter_config(kind))
    assert isinstance(model, PeftModel)
    if isinstance(kind, SoftPrompt):
        (virtual,) = (weight for weight in model.parameters() if weight.requires_grad)
        virtual.data.copy_(base.model.embed_tokens(torch.tensor(encode_system(kind.start))))
    return model


def adapter_config(kind: Kind) -> PeftConfig:
    """The settings of peft for one kind."""
    match kind:
        case Lora(rank, rslora):
            return _lora(rank, use_rslora=rslora)
        case Dora(rank):
            return _lora(rank, use_dora=True)
        case Ia3():
            return IA3Config(
                task_type="CAUSAL_LM", target_modules=PROJECTIONS, feedforward_modules=FEED_FORWARD
            )
        case SoftPrompt(start):
            tokens = len(encode_system(start))
            return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)


def train(task: Task, base: Path, out: Path, *, seed: int) -> None:
    """Train one expert and save it as a PEFT directory, weights in float16."""
    torch.manual_seed(seed)
    model = attach(load_base(base), task.kind)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    peak = PEAK_OF_FEW if isinstance(task.kind, Ia3 | SoftPrompt) else PEAK
    optimiser = torch.optim.AdamW(weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = Schedule(steps=task.steps, batch=BATCH, peak=peak, warmup=WARMUP)
    turns = (encode(each.prompt, each.answer) for each in training_set(task, seed))
    fit(model, turns, schedule=schedule, optimisers=[optimiser], seed=seed)
    save(model, out)


def save(model: PeftModel, out: Path) -> None:
    """Write a PEFT directory, weights in float16."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.half().save_pretrained(str(out), save_embedding_layers=False)
    _tidy(out)


def main() -> None:
    """Train all experts, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base")
    parser.add_argument("--out", type=Path, required=True, help="folder for the experts' folders")
    parser.add_argument("--only", choices=[task.short_name for task in EXPERTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    for task in EXPERTS:
        if options.only in (None, name := task.short_name):
            started = time.monotonic()
            train(task, options.base, options.out / name, seed=options.seed)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def _lora(rank: int, *, use_rslora: bool = False, use_dora: bool = False) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        use_rslora=use_rslora,
        use_dora=use_dora,
        target_modules=PROJECTIONS,
    )


def _tidy(out: Path) -> None:
    """Undo what differs from run to run: peft writes a set, and a card for a hub."""
    (out / "README.md").unlink(missing_ok=True)
    path = out / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ordered = {"target_modules": PROJECTIONS, "feedforward_modules": FEED_FORWARD}
    config |= {name: modules for name, modules in ordered.items() if name in config}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "adapter_model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
