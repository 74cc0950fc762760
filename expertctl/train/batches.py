"""Tokens of training examples, and the order in which they are learnt.

A prompt is encoded as for a run: by the chat template of the base, user text never as control
tokens. The answer follows the start of the assistant's turn, as a run would generate it, and then
the token that ends a turn. Only the tokens of answers, with that end, are learnt. An earlier answer
of a conversation is learnt too, unless the template writes earlier turns in another way.

Examples of about the same length share a batch, padded at the right. Attention is causal, so no
token sees padding or another example, and no attention mask is needed. On a processor that is as
fast as packing examples into one row, whose attention grows with the square of the row's length.
The order depends on the seed and the epoch only, so a resumed training continues with it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.text.chat_template import encode_chat
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import ExpertError, IncompatibleError, InvalidPackageError
from expertctl.schema.validation import MAX_PROBLEMS
from expertctl.train.data import TrainingData, TrainingExample

MAX_LENGTH = 4096
"""Most tokens of an example, in a longer context too: memory grows with them."""
_SORTED_BATCHES = 16
"""How many batches are made of examples that were sorted by length together."""
_MICRO_TOKENS = 2048
_MICRO_LOGITS = 1 << 26
"""Most tokens, and most logits, that are computed at once."""
_SAMPLE = (ConversationMessage("user", "Hi"), ConversationMessage("assistant", "Hello"))


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """The tokens of an example; ``spans`` are the (begin, end) of what is learnt."""

    line: int
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def first_learnt(self) -> int:
        """The position of the first learnt token."""
        return self.spans[0][0]

    @property
    def learnt_tokens(self) -> int:
        """How many tokens are learnt."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def last_answer_tokens(self) -> int:
        """How many tokens the last answer has, its end included."""
        begin, end = self.spans[-1]
        return end - begin


@dataclass(frozen=True, slots=True)
class EncodedData:
    """The examples that fit into the context, and the number of those that do not."""

    train: tuple[EncodedExample, ...]
    held_out: tuple[EncodedExample, ...]
    test_lines: frozenset[int]
    """The lines of the test examples."""
    too_long: int
    context: int
    """Most tokens of an example."""
    longest_answer: int
    """Tokens of the longest answer, its end included."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about the examples."""
        if not self.too_long:
            return ()
        return (f"{self.too_long} examples of more than {self.context} tokens were left out",)


def encode_data(
    tokenizer: Tokenizer,
    data: TrainingData,
    *,
    context: int,
    progress: Progress = ignore_progress,
) -> EncodedData:
    """Encode all examples; ``progress`` gets 1 for each.

    Those of the test are encoded to find now what would fail after training.

    Raises:
        InvalidPackageError: when an example cannot be encoded, with its line, or too few are left.
        IncompatibleError: when the base names no token that ends an answer.
    """
    end = find_turn_end(tokenizer)
    limit = min(context, MAX_LENGTH)
    problems: list[str] = []
    parts: list[tuple[EncodedExample, ...]] = []
    for part in (data.train, data.held_out, data.test):
        encoded: list[EncodedExample] = []
        for example in part:
            progress(1)
            try:
                encoded.append(encode_example(tokenizer, example, end=end))
            except ExpertError as error:
                problems.append(f"line {example.line}: {error.message}")
        parts.append(tuple(encoded))
    if problems:
        raise InvalidPackageError(str(data.path), problems[:MAX_PROBLEMS])
    train, held_out, test = (_select_fitting(part, limit) for part in parts)
    too_long = sum(map(len, parts)) - len(train) - len(held_out) - len(test)
    if not (train and held_out):
        problem = f"{too_long} examples have more than {limit} tokens; too few others are left"
        raise InvalidPackageError(str(data.path), [problem], hint="shorten the prompts")
    longest = max(example.last_answer_tokens for example in (*train, *held_out))
    lines = frozenset(example.line for example in test)
    return EncodedData(train, held_out, lines, too_long, limit, longest)


def _select_fitting(part: Sequence[EncodedExample], limit: int) -> tuple[EncodedExample, ...]:
    return tuple(example for example in part if len(example.ids) <= limit)


def find_turn_end(tokenizer: Tokenizer) -> int:
    """Return the token with which the chat template ends a turn; else the end of a text.

    Raises:
        IncompatibleError: when there is neither.
    """
    ends = tokenizer.end_ids
    if tokenizer.config.template is not None:
        turn = encode_chat(tokenizer, _SAMPLE, end="as_is").ids
        prompt = encode_chat(tokenizer, _SAMPLE[:1]).ids
        tail = turn[len(prompt) :] if turn[: len(prompt)] == prompt else turn[-4:]
        found = next((token for token in tail if token in ends), None)
        if found is not None:
            return found
    named = tokenizer.token_id(tokenizer.config.special_tokens.get("eos_token", ""))
    if named is None and not ends:
        raise IncompatibleError(
            "the base names no token that ends an answer, so its experts could not stop",
            hint="name one as eos_token in tokenizer_config.json",
        )
    return min(ends) if named is None else named


def encode_example(tokenizer: Tokenizer, example: TrainingExample, *, end: int) -> EncodedExample:
    """Encode one conversation, to learn its answers.

    Raises:
        ExpertError: when the chat template refuses it, or a text cannot be encoded.
    """
    messages, ids = example.messages, list[int]()
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message.role != "assistant" or number == 0:
            continue
        prompt = list(encode_chat(tokenizer, messages[:number]).ids)
        if prompt[: len(ids)] != ids:
            spans = []  # the template writes earlier turns in another way
        answer = tokenizer.encode_piece(message.content, parse_special=False, is_first=False)
        ids = [*prompt, *answer, end]
        spans.append((len(prompt), len(ids)))
    return EncodedExample(example.line, tuple(ids), tuple(spans))


Batch = tuple[EncodedExample, ...]


def arrange_epoch(
    examples: Sequence[EncodedExample], *, batch_size: int, seed: int, epoch: int
) -> list[Batch]:
    """Return the batches of an epoch in order: all examples, each once."""
    chooser = random.Random(f"{seed}/{epoch}")  # noqa: S311  # not a secret
    shuffled = list(examples)
    chooser.shuffle(shuffled)
    batches: list[Batch] = []
    size = batch_size * _SORTED_BATCHES
    for begin in range(0, len(shuffled), size):
        alike = sorted(shuffled[begin : begin + size], key=lambda example: len(example.ids))
        batches += [tuple(alike[at : at + batch_size]) for at in range(0, len(alike), batch_size)]
    chooser.shuffle(batches)
    return batches


def arrange_by_length(examples: Sequence[EncodedExample], *, batch_size: int) -> list[Batch]:
    """Return batches of examples sorted by length."""
    alike = sorted(examples, key=lambda example: len(example.ids))
    return [tuple(alike[at : at + batch_size]) for at in range(0, len(alike), batch_size)]


def split_batch(batch: Batch, *, vocab: int) -> Iterator[Batch]:
    """Split a batch into parts that are computed one after the other, to bound memory."""
    part: list[EncodedExample] = []
    for example in batch:
        grown = [*part, example]
        length = max(len(each.ids) for each in grown)
        learnt = length - min(each.first_learnt for each in grown) + 1
        too_large = len(grown) * max(length / _MICRO_TOKENS, learnt * vocab / _MICRO_LOGITS) > 1
        if part and too_large:
            yield tuple(part)
            grown = [example]
        part = grown
    yield tuple(part)
