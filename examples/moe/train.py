"""Train a small base of routed experts: `python -m examples.moe.train --minutes N --out DIR`.

It may be cut in pieces: what is reached after ``--minutes`` is kept in the folder, and the next
call goes on from there. When all steps are done the folder holds the base and nothing else. The
seed and the number of threads decide what comes out, wherever it is cut.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from examples.moe.text import Document, held_out_documents, training_documents
from examples.starter.fitting import Schedule, prepare
from examples.starter.vocab import END, END_OF_TEXT, MAX_LENGTH, SIZE, SPECIALS, save_tokenizer

SCHEDULE = Schedule(steps=1000, batch=8, peak=3e-3, warmup=50)
BALANCE = 0.01
"""How much the loss that balances the experts of each layer counts."""
HELD_OUT = 32
"""Documents that the result is measured on."""
_CHECKPOINT = "training.pt"
_TELL_EVERY = 20


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """A model and what trains it."""

    model: Qwen3MoeForCausalLM
    optimisers: tuple[torch.optim.Optimizer, ...]
    schedule: Schedule
    seed: int


def build_model(layers: int = 6, experts: int = 32) -> Qwen3MoeForCausalLM:
    """Return a Qwen3-MoE with five million random parameters, a quarter of them used per token."""
    config = Qwen3MoeConfig(
        vocab_size=SIZE,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]  # a key of its files, not of the class
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,  # of no layer
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,  # it would balance all layers together: see `imbalance`
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=None,
        eos_token_id=SPECIALS[END],
        pad_token_id=SPECIALS[END_OF_TEXT],
    )
    return Qwen3MoeForCausalLM(config)


def begin(schedule: Schedule, seed: int, model: Qwen3MoeForCausalLM | None = None) -> Training:
    """Return a training that has done nothing yet.

    Muon trains the matrices of attention, AdamW all else.
    """
    model = model or build_model()
    matrices = [w for n, w in model.model.layers.named_parameters() if "_attn" in n and w.ndim == 2]
    taken = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in taken]
    peak = schedule.peak
    muon = torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    return Training(model, (muon, adam), schedule, seed)


def advance(
    training: Training, first: int, *, most: int | None = None, seconds: float = inf
) -> int:
    """Do steps from ``first`` on, as many as there is time for; return which comes next."""
    training.model.train()
    last = training.schedule.steps if most is None else min(training.schedule.steps, first + most)
    started = time.monotonic()
    for step in range(first, last):
        spent = time.monotonic() - started
        if spent >= seconds:
            return step
        loss = _step(training, step)
        if step % _TELL_EVERY == 0 or step == training.schedule.steps - 1:
            _tell(f"step {step:5d}  loss {loss:.4f}  {spent:6.0f} s")
    return last


def resume(training: Training, path: Path) -> int:
    """Read what was kept, if anything was; return which step comes next."""
    if not path.exists():
        return 0
    kept = torch.load(path, weights_only=True)
    training.model.load_state_dict(kept["model"])
    for optimiser, state in zip(training.optimisers, kept["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    return int(kept["step"])


def keep(training: Training, path: Path, step: int) -> None:
    """Keep what is needed to go on with a step; the file is there whole or not at all."""
    states = [optimiser.state_dict() for optimiser in training.optimisers]
    beside = path.with_suffix(".new")
    torch.save({"step": step, "model": training.model.state_dict(), "optimisers": states}, beside)
    beside.replace(path)


def save(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Write an ordinary Hugging Face directory, weights in bfloat16."""
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(out)


@torch.inference_mode()
def perplexity(model: Qwen3MoeForCausalLM, documents: Sequence[Document]) -> tuple[float, float]:
    """Return how many bytes the model wavers between on average: in all text, and in answers."""
    model.train(False)
    ids = _ids(documents)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    answers = torch.tensor([document.answers for document in documents])[:, 1:]
    return exp(loss.mean().item()), exp(loss[answers].mean().item())


def imbalance(logits: Sequence[Tensor], *, used: int) -> Tensor:
    """Return how unevenly experts are used, the mean of all layers; at best it is ``used``.

    All layers at once, as transformers has it, leave each with a dozen experts that it uses.
    """
    each = [load_balancing_loss_func((layer,), layer.shape[-1], used) for layer in logits]
    return torch.stack([torch.as_tensor(loss) for loss in each]).mean()


def unigram_perplexity(documents: Sequence[Document]) -> float:
    """Return the perplexity of a model that knows only how often each byte of this text occurs."""
    counts = torch.bincount(_ids(documents).flatten(), minlength=SIZE).double()
    return exp(torch.special.entr(counts / counts.sum()).sum().item())


def main() -> None:
    """Train for a while; save the base when all is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the base")
    parser.add_argument(
        "--minutes", type=float, default=inf, help="stop after so many; go on later"
    )
    parser.add_argument("--steps", type=int, default=SCHEDULE.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    schedule = Schedule(options.steps, SCHEDULE.batch, SCHEDULE.peak, SCHEDULE.warmup)
    train(schedule, options.out, seed=options.seed, seconds=60 * options.minutes)


def train(schedule: Schedule, out: Path, *, seed: int, seconds: float = inf) -> bool:
    """Train what lies in a folder for so long; return whether it is done."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / _CHECKPOINT
    if (out / "config.json").exists():
        _tell(f"{out} holds a base")
        return True
    training = begin(schedule, seed)
    step = advance(training, resume(training, path), seconds=seconds)
    if step < schedule.steps:
        keep(training, path, step)
        _tell(f"{step} of {schedule.steps} steps are done; the next call continues")
        return False
    save(training.model, out)
    path.unlink(missing_ok=True)
    _tell_result(training.model)
    return True


def _tell_result(model: Qwen3MoeForCausalLM) -> None:
    model.float()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    documents = held_out_documents(HELD_OUT)
    whole, answers = perplexity(model, documents)
    alone = unigram_perplexity(documents)
    _tell(f"held-out text: perplexity {whole:.3f} a byte, answers {answers:.3f}, bytes {alone:.1f}")


def _step(training: Training, step: int) -> float:
    """Read the documents of one step; return the loss without what balances experts."""
    model, schedule = training.model, training.schedule
    ids = _ids(training_documents(schedule.batch, seed=training.seed, step=step))
    out = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
    (
        out.loss + BALANCE * imbalance(out.router_logits, used=model.config.num_experts_per_tok)
    ).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in training.optimisers:
        for group in optimiser.param_groups:
            group["lr"] = schedule.peak * schedule.rate(step)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return float(out.loss.detach())


def _ids(documents: Sequence[Document]) -> Tensor:
    return torch.tensor([document.ids for document in documents])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
