"""Everyday questions, answered by a base in float32, in int4, and in llama.cpp's Q4_K_M.

The texts are written side by side for people; nothing is judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.engines import LLAMA_INSTALL, has_llama
from benchmarks.trained.answers import BaseWithExperts
from benchmarks.trained.llama_formats import LlamaBase, quantise
from benchmarks.trained.merged_base import write_float_gguf
from benchmarks.trained.start_base import load_tokenizer
from benchmarks.trained.training import END_OF_TURN, encode_prompt

QUESTIONS = (
    "What is the capital of France?",
    "What is 12 times 7?",
    "Why is the sky blue?",
    "Hello, how are you?",
    "Tell me a joke",
    "Write a poem about rain",
    "Who wrote Hamlet?",
    "How do I bake bread?",
    "Explain photosynthesis in simple words",
    "Translate good morning into Spanish",
    "Write a function that reverses a string in Python",
    "Give me a recipe for pancakes",
)
TOKENS = 40
RIVAL = "Q4_K_M"


def write_answers(path: Path, name: str, directory: Path, opened: BaseWithExperts) -> None:
    """Append the answers of a base to a file, as Markdown."""
    columns = {
        "float32": opened.answer(QUESTIONS, None, dtype="float32", max_tokens=TOKENS),
        "int4": opened.answer(QUESTIONS, None, dtype="int4", max_tokens=TOKENS),
        RIVAL: _answer_with_llama(directory) if has_llama() else [LLAMA_INSTALL] * len(QUESTIONS),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join([f"## base {name}", "", *_format_table(columns), ""]))


def _answer_with_llama(directory: Path) -> list[str]:
    tokenizer = load_tokenizer(directory)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    with LlamaBase(quantise(write_float_gguf(directory), RIVAL)) as llama:
        answers = [
            llama.answer(encode_prompt(tokenizer, question), tokens=TOKENS, end=end)
            for question in QUESTIONS
        ]
    return [tokenizer.decode(ids) for ids in answers]


def _format_table(columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield " | ".join(["| question", *columns]) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for question, *answers in zip(QUESTIONS, *columns.values(), strict=True):
        cells = [" ".join(answer.split()).replace("|", "\\|") for answer in answers]
        yield " | ".join([f"| {question}", *cells]) + " |"
