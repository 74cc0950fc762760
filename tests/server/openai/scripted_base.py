"""A base whose answers are known by heart: each token has one successor.

Its layers add nothing, so the last token alone decides, and the chat template ends a prompt with
the token that begins one of the scripts. What reads, computes, samples and decodes is the engine
as it is; only the weights are not random.
"""

import json
from itertools import pairwise
from pathlib import Path

from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer

from expertctl.package.base_model import read_base
from tests.factories import BYTE_TOKENS, VOCAB, make_package, write_base, write_safetensors
from tests.server.harness import ServedPackages
from tests.store.fixtures import make_key

HELLO = ("Hello", ", ", "wörld 🙂", "...")
THOUGHTS = ("<think>", "A greeting", " is due", "</think>", "Good ", "day")
INSIDE = ("Still thinking", "</think>\n\n", "Enough")
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALL = ("Let me look.", "<tool_call>", PARIS, "</tool_call>")
BOTH = ("<tool_call>\n", ROME, "\n</tool_call>", "\n<tool_call>", f" {PARIS}", " </tool_call>")
ANSWER = ("It is ", "sunny", " in Paris")
OBJECT = ('{"sorted": ', "[1, 2, 3]", " }")
BROKEN = ('{"sorted"', ": [1, 2")
FENCED = ("```json\n", '{"fenced": true}', "\n```", "\nThat is it.")
HOSTILE = ("<img src=x ", "onerror=\"document.title='owned'\">", "<script>alert(1)</script>")
FOREVER = ("On", " and")
"""The last word is followed by the first."""
SCRIPTS = {
    "[hello]": HELLO,
    "[thoughts]": THOUGHTS,
    "[inside]<think>": INSIDE,
    "[call]": CALL,
    "[both]": BOTH,
    "[answer]": ANSWER,
    "[object]": OBJECT,
    "[broken]": BROKEN,
    "[fenced]": FENCED,
    "[hostile]": HOSTILE,
    "[forever]": FOREVER,
}
CONTEXT = 16_384
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
<|im_start|>assistant
{%- set said = messages[-1].content -%}
{%- if messages[-1].role == 'tool' %}[answer]
{%- elif tools and 'both' in said %}[both]
{%- elif tools %}[call]
{%- elif 'broken' in said %}[broken]
{%- elif 'fenced' in said %}[fenced]
{%- elif 'forever' in said %}[forever]
{%- elif 'hostile' in said %}[hostile]
{%- elif 'JSON' in said %}[object]
{%- elif enable_thinking is defined and enable_thinking == 'inside' %}[inside]<think>
{%- elif enable_thinking or 'ponder' in said %}[thoughts]
{%- else %}[hello]
{%- endif -%}
"""
_CERTAIN_LOGIT = 8.0
_END_TOKEN = BYTE_TOKENS + 2


def make_scripted_packages(folder: Path) -> ServedPackages:
    """Write the base, and an expert that changes nothing of it."""
    base_dir = write_scripted_base(folder / "scripted")
    base = read_base(base_dir)
    package = make_package(
        folder / "acme-sql",
        "acme/sql",
        base_dir=base_dir,
        base=base,
        key=make_key("acme"),
        lora={"seed": 1, "scale": 0.0},
    )
    return ServedPackages(base_dir, base, {"acme/sql": package})


def write_scripted_base(directory: Path) -> Path:
    """Write it; return the directory."""
    words = [*SCRIPTS, *(word for words in SCRIPTS.values() for word in words)]
    assert len(words) == len(set(words)), "each word stands once"
    hidden = -(-(len(words) + 1) // 16) * 16
    write_base(
        directory,
        hidden=hidden,
        vocab=VOCAB + len(words),
        tie=False,
        max_position_embeddings=CONTEXT,
    )
    _write_weights(directory / "model.safetensors", words, hidden)
    _write_tokenizer(directory, words)
    return directory


def _write_weights(file: Path, words: list[str], hidden: int) -> None:
    """Give each word a direction of its own, in which its successor is sure."""
    arrays = load_file(file)
    place = {word: number for number, word in enumerate(words, 1)}
    for name, array in arrays.items():
        array[...] = 1.0 if name.endswith("norm.weight") else 0.0
    embedded, scores = arrays["model.embed_tokens.weight"], arrays["lm_head.weight"]
    embedded[:VOCAB, 0] = 1.0
    for number in place.values():
        embedded[VOCAB + number - 1, number] = 1.0
    scores[_END_TOKEN] = _CERTAIN_LOGIT / 2
    steps = [step for start, script in SCRIPTS.items() for step in pairwise((start, *script))]
    for word, after in [*steps, FOREVER[::-1]]:
        scores[VOCAB + place[after] - 1, place[word]] = _CERTAIN_LOGIT
    write_safetensors(file, arrays, metadata={"format": "pt"})


def _write_tokenizer(directory: Path, words: list[str]) -> None:
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    assert tokenizer.get_vocab_size() == VOCAB + len(words)
    tokenizer.save(str(file))
    config = directory / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8"))
    known |= {"chat_template": TEMPLATE, "model_max_length": CONTEXT}
    config.write_text(json.dumps(known), encoding="utf-8")
