"""Train the experts on a base: `python -m examples.starter.train --base DIR --out DIR`."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3ForCausalLM

from examples.starter.fitting import Schedule, encode, fit, prepare
from examples.starter.samples import BATCH
from examples.starter.tasks import TASKS, Task, training_set

PEAK = 4e-3
WARMUP = 20
BASE_NAME = "starter/base"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load_base(folder: Path) -> Qwen3ForCausalLM:
    """The saved weights, computed in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def attach(base: Qwen3ForCausalLM, task: Task) -> PeftModel:
    """The base with an empty LoRA on all seven projections."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=task.rank,
        lora_alpha=2 * task.rank,
        lora_dropout=0.0,
        use_rslora=task.rslora,
        target_modules=PROJECTIONS,
    )
    model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    return model


def train(task: Task, base: Path, out: Path, *, seed: int) -> None:
    """Train one expert and save it as a PEFT directory, weights in float16."""
    torch.manual_seed(seed)
    model = attach(load_base(base), task)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = Schedule(steps=task.steps, batch=BATCH, peak=PEAK, warmup=WARMUP)
    turns = (encode(each.prompt, each.answer) for each in training_set(task, seed))
    fit(model, turns, schedule=schedule, optimisers=[optimiser], seed=seed)
    save(model, out)


def save(model: PeftModel, out: Path) -> None:
    """Write a PEFT directory, weights in float16."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.half().save_pretrained(str(out), save_embedding_layers=False)
    _tidy(out)


def short_name(task: Task) -> str:
    """The name of a task without its namespace: the name of its folder."""
    return task.name.rpartition("/")[2]


def main() -> None:
    """Train all experts, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base")
    parser.add_argument("--out", type=Path, required=True, help="folder for the experts' folders")
    parser.add_argument("--only", choices=list(map(short_name, TASKS)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    for task in TASKS:
        if options.only in (None, name := short_name(task)):
            started = time.monotonic()
            train(task, options.base, options.out / name, seed=options.seed)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def _tidy(out: Path) -> None:
    """Undo what differs from run to run: peft writes a set, and a card for a hub."""
    (out / "README.md").unlink(missing_ok=True)
    path = out / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = PROJECTIONS
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "adapter_model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
