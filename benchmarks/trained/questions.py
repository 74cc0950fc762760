"""Answers of llama.cpp, and everyday questions to a base in float32, int4 and Q4_K_M.

The answers to questions are written side by side for people; nothing is judged.
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
        RIVAL: [LLAMA_INSTALL] * len(QUESTIONS),
    }
    if has_llama():
        columns[RIVAL] = answer_with_llama(directory, RIVAL, QUESTIONS, max_tokens=TOKENS)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join([f"## base {name}", "", *_format_table(columns), ""]))


def answer_with_llama(
    directory: Path, name: str, prompts: Sequence[str], *, max_tokens: int
) -> list[str]:
    """Return the greedy answers of a base in a format of llama.cpp."""
    tokenizer = load_tokenizer(directory)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    with LlamaBase(quantise(write_float_gguf(directory), name)) as llama:
        answers = [
            llama.answer(encode_prompt(tokenizer, prompt), tokens=max_tokens, end=end)
            for prompt in prompts
        ]
    return [tokenizer.decode(ids) for ids in answers]


def _format_table(columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield " | ".join(["| question", *columns]) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for question, *answers in zip(QUESTIONS, *columns.values(), strict=True):
        cells = [" ".join(answer.split()).replace("|", "\\|") for answer in answers]
        yield " | ".join([f"| {question}", *cells]) + " |"
