"""Tokens of examples, against the chat template in transformers, and the order of batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.train.batches import (
    EncodedExample,
    arrange_by_length,
    arrange_epoch,
    encode_data,
    encode_example,
    find_turn_end,
    split_batch,
)
from expertctl.train.data import TrainingExample, read_training_data
from tests.factories import BYTE_TOKENS, write_tokenizer
from tests.train.fixtures import write_examples, write_rows

END = BYTE_TOKENS + 2
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
"""The template of `write_tokenizer`, with the answers marked as transformers wants them."""
TALKS: list[list[tuple[str, str]]] = [
    [("user", "Sort 3, 1"), ("assistant", "1, 3")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello\nyou")],
    [("user", "a"), ("assistant", "b é"), ("user", "c"), ("assistant", " f ")],
]


def make_example(turns: list[tuple[Any, str]]) -> TrainingExample:
    return TrainingExample(1, tuple(ConversationMessage(role, text) for role, text in turns))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return made


@pytest.mark.parametrize("turns", TALKS)
def test_tokens_and_mask_are_those_of_the_template_in_transformers(
    turns: list[tuple[str, str]], folder: Path
) -> None:
    found = encode_example(Tokenizer.open(folder), make_example(turns), end=END)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": role, "content": text} for role, text in turns],
        chat_template=MARKED_TEMPLATE,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = theirs["input_ids"], theirs["assistant_masks"]
    last = max(n for n, learnt in enumerate(mask) if learnt) + 1
    assert list(found.ids) == ids[:last]  # without the line end after the last turn
    learnt = [0] * last
    for begin, end in found.spans:
        learnt[begin:end] = [1] * (end - begin)
    assert learnt == mask[:last]
    assert found.learnt_tokens == sum(mask)


def test_control_tokens_in_a_prompt_and_an_answer_stay_letters(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    turns = [("user", "a<|im_end|>b"), ("assistant", "<|im_end|>")]
    found = encode_example(tokenizer, make_example(turns), end=END)
    assert list(found.ids).count(END) == 2  # of the user's turn and of the answer
    ((begin, end),) = found.spans
    assert list(found.ids[begin:end]) == [*tokenizer.encode("<|im_end|>"), END]


def test_only_the_last_answer_is_learnt_where_earlier_turns_are_written_otherwise(
    folder: Path, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = encode_example(Tokenizer.open(tmp_path), make_example(TALKS[2]), end=END)
    assert [end - begin for begin, end in found.spans] == [len(" f ") + 1]


def test_a_turn_ends_with_the_token_of_the_template(folder: Path, tmp_path: Path) -> None:
    assert find_turn_end(Tokenizer.open(folder)) == END
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_turn_end(Tokenizer.open(tmp_path)) == BYTE_TOKENS


def test_without_a_template_an_answer_follows_the_prompt_and_the_text_ends(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.open(tmp_path)
    assert find_turn_end(tokenizer) == END
    found = encode_example(tokenizer, make_example(TALKS[0]), end=END)
    assert list(found.ids) == [*tokenizer.encode("Sort 3, 1"), *tokenizer.encode("1, 3"), END]
    assert found.spans == ((9, 14),)


def test_a_base_without_an_end_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"], config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(IncompatibleError, match="no token that ends an answer"):
        find_turn_end(Tokenizer.open(tmp_path))


def test_examples_longer_than_the_context_are_left_out_and_counted(
    folder: Path, tmp_path: Path
) -> None:
    path = write_examples(tmp_path / "data.jsonl")
    text = path.read_text() + json.dumps({"prompt": "x" * 80, "answer": "y" * 80})
    data = read_training_data(write_rows(path, text.splitlines()))
    assert data.train[-1].line == 61  # not held out, so it would be learnt
    found = encode_data(Tokenizer.open(folder), data, context=100)
    assert found.too_long == 1
    assert found.warnings == ("1 examples of more than 100 tokens were left out",)
    assert len(found.train) == len(data.train) - 1
    assert found.longest_answer == len("zz") + 1
    with pytest.raises(InvalidPackageError, match="have more than 20 tokens"):
        encode_data(Tokenizer.open(folder), data, context=20)


def test_test_examples_longer_than_the_context_are_left_out_too(
    folder: Path, tmp_path: Path
) -> None:
    path = write_examples(tmp_path / "data.jsonl")
    test = {e.line for e in read_training_data(path).test}
    lines = path.read_text().splitlines()
    long = min(test)
    row = json.loads(lines[long - 1])
    lines[long - 1] = json.dumps({**row, "answer": "y" * 200})
    write_rows(path, lines)
    found = encode_data(Tokenizer.open(folder), read_training_data(path), context=100)
    assert found.too_long == 1
    assert found.test_lines == test - {long}


def test_a_test_prompt_that_the_template_refuses_is_found_before_training(tmp_path: Path) -> None:
    data = read_training_data(write_examples(tmp_path / "data.jsonl"))
    refused = data.test[0]
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    check = (
        f"{{% if messages[0]['content'] == '{refused.prompt}' %}}{{{{ raise_exception('no') }}}}"
    )
    config["chat_template"] = f"{check}{{% endif %}}{config['chat_template']}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidPackageError) as caught:
        encode_data(Tokenizer.open(tmp_path), data, context=100)
    (problem,) = caught.value.problems
    assert problem.startswith(f"line {refused.line}: the chat template does not accept")


def make_encoded(*lengths: int) -> list[EncodedExample]:
    return [
        EncodedExample(line, tuple(range(length)), ((length - 2, length),))
        for line, length in enumerate(lengths, start=1)
    ]


def test_an_epoch_has_each_example_once_in_batches_of_similar_length() -> None:
    examples = make_encoded(*[5 + 37 * n % 90 for n in range(100)])
    batches = arrange_epoch(examples, batch_size=8, seed=1, epoch=0)
    assert sorted(e.line for batch in batches for e in batch) == list(range(1, 101))
    assert sorted(len(batch) for batch in batches) == [4] + [8] * 12
    padded = sum(len(batch) * max(len(e.ids) for e in batch) for batch in batches)
    assert padded < 1.15 * sum(len(e.ids) for e in examples)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    examples = make_encoded(*[5 + 37 * n % 90 for n in range(40)])
    orders = {
        key: arrange_epoch(examples, batch_size=4, seed=key[0], epoch=key[1])
        for key in ((0, 0), (0, 1), (1, 0))
    }
    assert orders[0, 0] == arrange_epoch(examples, batch_size=4, seed=0, epoch=0)
    assert orders[0, 0] != orders[0, 1]
    assert orders[0, 0] != orders[1, 0]
    sizes = [len(e.ids) for batch in arrange_by_length(examples, batch_size=4) for e in batch]
    assert sizes == sorted(len(e.ids) for e in examples)


def test_a_batch_is_split_where_its_tokens_or_logits_take_too_much_memory() -> None:
    batch = tuple(make_encoded(1000, 1000, 1000, 500, 3000))
    parts = list(split_batch(batch, vocab=100))
    assert [[len(e.ids) for e in part] for part in parts] == [[1000, 1000], [1000, 500], [3000]]
    alike = tuple(make_encoded(10, 10, 10, 10))
    assert [len(part) for part in split_batch(alike, vocab=10_000_000)] == [2, 2]
    assert [len(part) for part in split_batch(alike, vocab=100)] == [4]
