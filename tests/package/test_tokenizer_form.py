"""One tokenizer has one digest, however it was saved; what tokenises otherwise has another.

The oracle is the `tokenizers` library: the vectors hold what eight of its releases saved, with
canonical forms that were written by hand.
"""

import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from expertctl.errors import InvalidPackageError
from expertctl.package.tokenizer import canonicalise_tokenizer, compute_tokenizer_digest
from expertctl.reference import Digest

Document = dict[str, Any]

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "tokenizer_forms.json").read_text(encoding="utf-8")
)
KNOWN = {known["name"]: known for known in VECTORS["tokenizers"]}
SAVED = [
    pytest.param(known, saved["document"], id=f"{known['name']} by {saved['by'][0]}")
    for known in VECTORS["tokenizers"]
    for saved in known["saved"]
]
PROBES = ["".join(letters) for n in range(1, 4) for letters in product("ab c", repeat=n)]


def digest(document: Document) -> Digest:
    return compute_tokenizer_digest(json.dumps(document).encode(), what="tokenizer.json")


def digest_or_refused(document: Document) -> Digest | str:
    """The library reads a model with broken merges and without a type as one of words."""
    try:
        return digest(document)
    except InvalidPackageError as error:
        return str(error)


def opened(document: Document) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(document))


def newest(name: str) -> Document:
    document: Document = copy.deepcopy(KNOWN[name]["saved"][-1]["document"])
    return document


def bpe(merges: list[Any], **model: Any) -> Document:
    tokens = {part for merge in merges for part in (*merge, "".join(merge)) if len(merge) == 2}
    vocab = {token: number for number, token in enumerate(sorted({"a", "b", "c", *tokens}))}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": merges, **model}}


def token(number: int, content: str, **changes: Any) -> Document:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **flags, **changes}


@pytest.mark.parametrize(("known", "document"), SAVED)
def test_what_any_release_saved_has_the_form_that_was_written_by_hand(
    known: Document, document: Document
) -> None:
    form = canonicalise_tokenizer(json.dumps(document).encode(), what="tokenizer.json")
    assert form.decode() == known["canonical"]
    assert str(Digest.compute(form)) == known["digest"]


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize("name", KNOWN)
def test_a_tokenizer_that_is_saved_again_here_is_the_same(name: str, pretty: bool) -> None:
    again = opened(newest(name)).to_str(pretty=pretty).encode()
    assert str(compute_tokenizer_digest(again, what="tokenizer.json")) == KNOWN[name]["digest"]


def test_a_tokenizer_that_was_saved_while_it_cut_and_padded_is_the_same() -> None:
    backend = opened(newest("wordpiece"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    saved = backend.to_str().encode()
    assert (
        str(compute_tokenizer_digest(saved, what="tokenizer.json")) == KNOWN["wordpiece"]["digest"]
    )


def test_merges_written_as_texts_and_as_pairs_are_the_same() -> None:
    pairs, texts = bpe([["a", "b"], ["ab", "c"]]), bpe([["a", "b"], ["ab", "c"]])
    texts["model"]["merges"] = ["a b", "ab c"]
    assert digest(texts) == digest(pairs)
    assert opened(texts).encode("abc").ids == opened(pairs).encode("abc").ids


def test_merges_whose_parts_hold_spaces_are_told_apart() -> None:
    left, right = bpe([["a", "b"]]), bpe([["a", "b"]])
    tokens = ("a", "b", " ", "a ", " b", "a b")
    for document in (left, right):
        document["model"]["vocab"] = {piece: number for number, piece in enumerate(tokens)}
    left["model"]["merges"] = [["a", " "], ["a ", "b"]]
    right["model"]["merges"] = [["a", " "], ["a", " b"]]
    assert opened(left).encode("a b").ids != opened(right).encode("a b").ids
    assert digest(left) != digest(right)


def test_a_version_line_among_merges_is_no_merge() -> None:
    plain, headed = bpe([["a", "b"]]), bpe([["a", "b"]])
    plain["model"]["merges"], headed["model"]["merges"] = ["a b"], ["#version: 0.2", "a b"]
    assert opened(headed).to_str() == opened(plain).to_str()
    assert digest(headed) == digest(plain)


def test_a_merge_that_is_there_twice_counts_at_its_last_place() -> None:
    twice = bpe([["a", "b"], ["b", "c"], ["a", "b"]])
    once = bpe([["b", "c"], ["a", "b"]])
    assert opened(twice).encode("abc").ids == opened(once).encode("abc").ids
    assert digest(twice) == digest(once) != digest(bpe([["a", "b"], ["b", "c"]]))


@pytest.mark.parametrize(
    "merges",
    [
        ["a b c"],
        ["ab"],
        [["a", "b"], "b c"],
        ["a b", ["b", "c"]],
        [["a", "b", "c"]],
        [["a", 1]],
        [7],
    ],
)
def test_merges_that_the_library_does_not_read_are_refused(merges: list[Any]) -> None:
    document = bpe([["a", "b"]])
    document["model"]["merges"] = merges
    with pytest.raises(Exception, match=r"untagged enum|Merges text"):
        opened(document)
    with pytest.raises(InvalidPackageError, match="is not a pair of texts"):
        digest(document)


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_that_does_not_name_its_type_is_the_same(name: str) -> None:
    document = newest(name)
    del document["model"]["type"]
    assert str(digest(document)) == KNOWN[name]["digest"]
    assert opened(document).to_str() == opened(newest(name)).to_str()


def test_an_empty_prefix_of_subwords_is_none() -> None:
    none, empty = bpe([["a", "b"]]), bpe([["a", "b"]], continuing_subword_prefix="")
    assert [opened(none).encode(p).ids for p in PROBES] == [
        opened(empty).encode(p).ids for p in PROBES
    ]
    assert digest(none) == digest(empty)
    assert digest(bpe([])) != digest(bpe([], continuing_subword_prefix="##"))


def test_a_prefix_space_that_disagrees_with_its_scheme_is_kept() -> None:
    """Releases up to 0.15 wrote it, later ones refuse to read it."""
    old, new = newest("unigram"), newest("unigram")
    old["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}
    new["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    with pytest.raises(Exception, match="add_prefix_space"):
        opened(old)
    assert len({digest(old), digest(new), digest(newest("unigram"))}) == 3
    new["pre_tokenizer"]["add_prefix_space"] = False
    assert opened(new).encode("a").ids == [3]
    old["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    assert digest(old) == digest(new)


def test_scores_are_those_of_sentencepiece() -> None:
    """The library itself reads ``-14.366621017456055`` as ``-14.366621017456056``."""
    read, other = newest("unigram"), newest("unigram")
    read["model"]["vocab"][2][1] = -14.366621017456056
    other["model"]["vocab"][2][1] = -14.366622
    assert digest(read) == digest(newest("unigram")) != digest(other)


def test_added_tokens_that_name_tokens_of_the_vocabulary_have_no_order() -> None:
    document = bpe([["a", "b"]])
    added = [token(0, "a"), token(2, "b"), token(4, "<x>"), token(5, "<y>")]
    documents = [
        {**document, "added_tokens": order} for order in (added, [added[i] for i in (2, 1, 3, 0)])
    ]
    assert len({tuple(opened(d).encode("<y>ab<x>").ids) for d in documents}) == 1
    assert digest(documents[0]) == digest(documents[1])


def test_the_order_of_added_tokens_counts_where_it_gives_them_their_ids() -> None:
    document = bpe([["a", "b"]])
    added = [token(4, "<x>"), token(5, "<y>")]
    forth, back = ({**document, "added_tokens": order} for order in (added, added[::-1]))
    assert opened(forth).encode("<x>").ids != opened(back).encode("<x>").ids
    assert digest(forth) != digest(back)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"model":{"vocab":{"a":1,"a":2}}}', "duplicate key"),
        (b'{"model":{"vocab":[["a",NaN]]}}', "NaN"),
        (b'{"model":{"vocab":[["a",1e999]]}}', "too large"),
        (b'{"model":{"vocab":{"a":9007199254740993}}}', "2\\^53"),
        (b'{"model":{"vocab":{"\\ud800":1}}}', "surrogate"),
        (b'{"decoder":' + b'{"x":' * 40 + b"1" + b"}" * 41, "nested deeper"),
        (b'{"decoder":' + b"[" * 200_000, "not strict JSON"),
        (b"\xef\xbb\xbf{}", "not strict JSON"),
        (b'{"a":"\xff"}', "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"", "not strict JSON"),
        (b'{"model":{"vocab":{' + b'"a":1,' * 10_000_000, "more than 4,000,000 values"),
        (b'{"a":"' + b" " * (128 << 20) + b'"}', "too many bytes"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_a_hostile_tokenizer_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        compute_tokenizer_digest(data, what="tokenizer.json")


@pytest.mark.parametrize(
    "model", [None, 3, [], {"type": 7}, {"merges": {}}, {"vocab": 1, "type": "Unigram"}]
)
def test_what_is_no_tokenizer_at_all_has_a_digest_of_its_own(model: Any) -> None:
    """Whether it can be read is for the library to say."""
    assert digest({"model": model, "added_tokens": 1}) != digest({})


# Any document that is the same to us is the same to the library.

METASPACE = {"type": "Metaspace", "replacement": "c"}
SPLIT = {"type": "Split", "pattern": {"String": "b"}, "behavior": "Isolated", "invert": False}
PARTS: dict[str, list[Any]] = {
    "normalizer": [
        None,
        {"type": "Lowercase"},
        {"type": "Prepend", "prepend": "a"},
        {
            "type": "Sequence",
            "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": False}],
        },
    ],
    "pre_tokenizer": [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        {"type": "Metaspace", "replacement": "c"},
        {"type": "Metaspace", "replacement": "c", "add_prefix_space": True, "str_rep": "x"},
        {"type": "Metaspace", "replacement": "c", "prepend_scheme": "first", "split": False},
        {
            "type": "Metaspace",
            "replacement": "c",
            "prepend_scheme": "never",
            "add_prefix_space": True,
        },
        *(
            {"type": "Sequence", "pretokenizers": [SPLIT, {**METASPACE, "prepend_scheme": scheme}]}
            for scheme in ("always", "first", "never")
        ),
        {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, {"type": "Whitespace"}]},
    ],
}
FLAGS: dict[str, list[Any]] = {
    "fuse_unk": [None, False, True],
    "byte_fallback": [None, False, True],
    "ignore_merges": [None, False, True],
    "unk_token": [None, "a", "c"],
    "continuing_subword_prefix": [None, ""],  # others are refused beside these merges
    "end_of_word_suffix": [None, "", "b"],
    "dropout": [None],
}


@st.composite
def merges(draw: st.DrawFn) -> list[list[str]]:
    known, found = ["a", "b", "c", "Ġ", " "], []
    for _ in range(draw(st.integers(0, 5))):
        left, right = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        found.append([left, right])
        known.append(left + right)
    return found


@st.composite
def documents(draw: st.DrawFn) -> Document:
    drawn = draw(merges())
    document = bpe(drawn, **{k: draw(st.sampled_from(v)) for k, v in FLAGS.items()})
    vocab = document["model"]["vocab"]
    turned = [right + left for left, right in drawn]
    for piece in ("Ġ", " ", "abc", "cb", *turned):  # most of them only where merges are ignored
        vocab.setdefault(piece, len(vocab))
    contents = draw(
        st.lists(st.sampled_from(["a", "ab", "bb", "ca", "c c"]), unique=True, max_size=4)
    )
    new = [c for c in contents if c not in vocab]
    document["added_tokens"] = [
        token(
            vocab[c] if c in vocab else len(vocab) + new.index(c),
            c,
            normalized=draw(st.booleans()),
            special=draw(st.booleans()),
            lstrip=draw(st.booleans()),
        )
        for c in contents
    ]
    return {**document, **{k: draw(st.sampled_from(v)) for k, v in PARTS.items()}}


def with_model(document: Document, **changes: Any) -> Document:
    return {**document, "model": {**document["model"], **changes}}


def with_added(document: Document, **changes: Any) -> Document:
    return {**document, "added_tokens": [{**t, **changes} for t in document["added_tokens"]]}


def variations(document: Document) -> Iterator[Document]:
    """The document with each single change that a person or a release may make."""
    model, added = document["model"], document["added_tokens"]
    for flag, values in FLAGS.items():
        yield from (with_model(document, **{flag: value}) for value in values)
        yield {**document, "model": {k: v for k, v in model.items() if k != flag}}
    for part, components in PARTS.items():
        yield from ({**document, part: component} for component in components)
        yield {k: v for k, v in document.items() if k != part}
    yield {**document, "model": {k: v for k, v in model.items() if k != "type"}}
    yield {**document, "truncation": None, "padding": None, "version": "1.0"}
    yield {**document, "added_tokens": added[::-1]}
    for flag in ("normalized", "special", "lstrip", "rstrip", "single_word"):
        yield from (with_added(document, **{flag: value}) for value in (True, False))
    yield from (with_model(document, merges=merges) for merges in other_merges(model["merges"]))
    vocab = list(model["vocab"].items())
    yield with_model(document, vocab=dict(vocab[::-1]))
    (first, low), (last, high) = vocab[0], vocab[-1]
    yield with_model(document, vocab={**model["vocab"], first: high, last: low})


def other_merges(merges: list[list[str]]) -> Iterator[list[Any]]:
    yield [" ".join(pair) for pair in merges]
    yield [*merges, *merges[:1]]
    yield [*merges[1:], *merges[:1]]
    yield merges[::-1]
    yield [pair[::-1] for pair in merges]
    yield merges[:-1]


def read(document: Document) -> list[list[int]] | None:
    try:
        backend = opened(document)
    except Exception:  # noqa: BLE001  # the library raises no other
        return None
    return [backend.encode(probe).ids for probe in PROBES]


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(documents())
def test_any_change_that_alters_tokens_changes_the_digest(document: Document) -> None:
    tokens: dict[Digest | str, list[list[int]]] = {}
    for variation in (document, *variations(document)):
        if (found := read(variation)) is not None:
            assert tokens.setdefault(digest_or_refused(variation), found) == found


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(documents())
def test_whatever_is_saved_again_is_the_same(document: Document) -> None:
    document["added_tokens"].sort(key=lambda each: each["id"])
    assume(read(document) is not None)
    again = json.loads(opened(document).to_str())
    assert read(again) == read(document)
    assert digest(again) == digest(document)
