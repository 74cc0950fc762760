"""Train the starter base: `python -m examples.starter.pretrain --out DIR`."""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.starter.fitting import Encoded, Schedule, encode, fit, prepare
from examples.starter.mixture import draw_turn
from examples.starter.vocab import END, END_OF_TEXT, MAX_LENGTH, SIZE, SPECIALS, save_tokenizer

SCHEDULE = Schedule(steps=2100, batch=32, peak=3e-3, warmup=60)


def build_model() -> Qwen3ForCausalLM:
    """Return a Qwen3 with about two million random parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=MAX_LENGTH,
            bos_token_id=None,
            eos_token_id=SPECIALS[END],
            pad_token_id=SPECIALS[END_OF_TEXT],
        )
    )


def optimisers(model: Qwen3ForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inner = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in inner]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write an ordinary Hugging Face directory, weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(out)


def main() -> None:
    """Train the base and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the base")
    parser.add_argument("--steps", type=int, default=SCHEDULE.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare(seed=options.seed, threads=options.threads)
    schedule = Schedule(options.steps, SCHEDULE.batch, SCHEDULE.peak, SCHEDULE.warmup)
    model = build_model()
    fit(
        model,
        _turns(options.seed),
        schedule=schedule,
        optimisers=optimisers(model, schedule.peak),
        seed=options.seed,
    )
    save(model, options.out)


def _turns(seed: int) -> Iterator[Encoded]:
    rng = random.Random(seed)
    while True:
        turn = draw_turn(rng)
        yield encode(turn.prompt, turn.answer, system=turn.system)


if __name__ == "__main__":
    main()
