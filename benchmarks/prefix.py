"""How soon the answer to a second question about a long document begins, against the first.

Uses `LocalEngine`, as `chat` does: a base in the shape of Qwen3-0.6B with random weights in
bfloat16 and a byte-level tokenizer, on disk, with the defaults of `run`; a conversation that begins
with the document, and a ``cache_key``. The first question about a document processes the document;
another one reuses its keys and values, and processes only the question. The time is ``ttft``: from
the request to the first token, including routing, and finding and copying pages.
"""

import json
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.harness import Row, Seconds, compare_times, main, take_turns
from benchmarks.inputs import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    list_module_shapes,
    make_config_document,
)
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.install.installer import STARTER
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore
from expertctl.user_request import SamplingOverrides, UserMessage

DOCUMENT, ANSWER = 8192, 4
"""Tokens of the document, each of which is a byte, and of an answer."""
SPREAD, RANDOM_NUMBERS = 0.02, 1 << 20


class DocumentChat:
    """Sends questions about documents to an engine, one after the other."""

    def __init__(self, engine: LocalEngine) -> None:
        """Use an engine with one base."""
        self._engine = engine
        self._questions, self._documents = count(1), 0

    def ask_first(self) -> Seconds:
        """Ask about a document that was not processed before."""
        self._documents += 1
        asked = self._ask()
        assert asked.kv_reused_tokens == 0, asked.kv_reused_tokens
        return asked.timings_ms["ttft"] / 1000

    def ask_next(self) -> Seconds:
        """Ask another question about the same document."""
        asked = self._ask()
        assert asked.kv_reused_tokens >= DOCUMENT, asked.kv_reused_tokens
        return asked.timings_ms["ttft"] / 1000

    def _ask(self) -> RunResult:
        question = f"What does line {next(self._questions)} say?"
        sampling = SamplingOverrides(greedy=True, max_tokens=ANSWER)
        route = RouteRequest(prompt=question, base_alone=True, seed=0, sampling=sampling)
        document = (f"{self._documents} documents. " * DOCUMENT)[:DOCUMENT]
        request = RunRequest(
            message=UserMessage(prompt=question),
            route=route,
            history=(
                ConversationMessage("user", document),
                ConversationMessage("assistant", "I have read it."),
            ),
            cache_key=f"document {self._documents}",
        )
        found: list[RunResult] = []
        for _ in _capture_result(self._engine.run(request), found):
            pass
        assert found[0].numerics.backend == "packed", "kernels are what is measured"
        return found[0]


def _capture_result(
    answer: Generator[str, None, RunResult], found: list[RunResult]
) -> Generator[str, None, None]:
    """Yield the text deltas of an answer; store its result."""
    found.append((yield from answer))


@contextmanager
def open_engine() -> Iterator[DocumentChat]:
    """Open an engine in a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder, "home"))
        BaseStore(home.bases).add(write_base(Path(folder, "base")))
        planner = Planner.open(Settings(home, encoder="lexical"))
        with closing(LocalEngine(planner)) as engine:
            yield DocumentChat(engine)


def write_base(directory: Path) -> Path:
    """Write a base with random weights, and the byte-level tokenizer of the starter base."""
    directory.mkdir()
    document = json.dumps(
        {**make_config_document(), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    )
    (directory / "config.json").write_text(document)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STARTER / "base" / name, directory / name)
    drawn = (
        torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))
        .mul(SPREAD)
        .bfloat16()
    )
    tensors = {
        f"{name}.weight": drawn.repeat(-(-out * into // RANDOM_NUMBERS))[: out * into].view(
            out, into
        )
        for name, (out, into) in {
            "model.embed_tokens": (VOCABULARY, HIDDEN),
            **list_module_shapes(),
        }.items()
    }
    for name, width in _make_norms():
        tensors[f"{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _make_norms() -> Iterator[tuple[str, int]]:
    yield "model.norm", HIDDEN
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}", HIDDEN
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"model.layers.{layer}.{name}", HEAD_DIM


def measure(rounds: int) -> Sequence[Row]:
    """Send a first and another question in turns."""
    with open_engine() as chat:
        found = take_turns({"first": chat.ask_first, "next": chat.ask_next}, rounds=rounds)
    case = f"first token of the next answer about {DOCUMENT} tokens"
    return [
        compare_times(
            case, found["next"], found["first"], steps=1, rival="of the first", target="<= 0.1"
        )
    ]


if __name__ == "__main__":
    main("prefix", measure, rounds=3)
