"""Adapters in GGUF files and merged bases, against PEFT, the `gguf` package and llama.cpp."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt
from tests.gguf_files import write_gguf

__all__ = ["expertctl"]

IDS = [7, 1, 30, 4, 99, 12, 250, 3, 8]
HEAD_DIM = 8
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3.0}}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def add_expert(expertctl: CommandRunner, base: Path, adapter: Path, *more: str) -> str:
    """Build a package of an adapter for a base; return its path."""
    expertctl("base", "add", str(base), "--name", "acme/base")
    built = expertctl("build", str(adapter), "--base", "acme/base", "-o", "one.expert", *more)
    assert built.exit_code == 0
    return "one.expert"


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def load_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def merge_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    adapted: Any = peft.PeftModel.from_pretrained(load_model(base), str(adapter))
    return {name: value.detach() for name, value in adapted.merge_and_unload().state_dict().items()}


WRITERS = {
    "lora": (write_lora, {}),
    "patterns": (write_lora, PATTERNS),
    "rslora": (write_lora, {"use_rslora": True}),
    "dora": (write_dora, {}),
    "ia3": (write_ia3, {}),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_merged_base_has_the_weights_that_peft_merges(
    kind: str, arch: str, expertctl: CommandRunner, tmp_path: Path
) -> None:
    write, options = WRITERS[kind]
    base = write_base(tmp_path / "base", arch=arch, tie=False)
    adapter = write(tmp_path / "adapter", base, **options)
    package = add_expert(expertctl, base, adapter)
    said = expertctl("export", package, "--merged", "-o", "merged", "--json").document
    assert (said["format"], said["base"]) == ("merged", "acme/base")
    written, wanted = load_file("merged/model.safetensors"), merge_by_peft(base, adapter)
    assert set(written) == set(wanted)
    for name, value in wanted.items():
        assert (written[name] - value).abs().max() < 1e-5, name
    originals = load_file(base / "model.safetensors")
    changed = [name for name, value in originals.items() if not torch.equal(value, written[name])]
    assert len(changed) >= 6
    assert all("proj" in name for name in changed)


@pytest.mark.all
def test_the_merged_base_answers_as_base_and_expert(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="qwen3")
    package = add_expert(expertctl, base, write_lora(tmp_path / "adapter", base))
    expertctl("export", package, "--merged", "-o", "merged")
    expertctl("base", "add", "merged", "--name", "acme/merged")
    options = ("abc", "--greedy", "-n", "12", "--json", "--dtype", "float32")
    ours = expertctl("run", *options, "--base", "acme/base", "--expert", "./one.expert")
    merged = expertctl("run", *options, "--base", "acme/merged", "--no-experts")
    assert ours.document["tokens"]["ids"] == merged.document["tokens"]["ids"]


def test_numbers_are_rounded_to_the_type_of_the_base(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama", dtype="bfloat16")
    adapter = write_lora(tmp_path / "adapter", base)
    expertctl("export", add_expert(expertctl, base, adapter), "--merged", "-o", "merged")
    written, wanted = load_file("merged/model.safetensors"), merge_by_peft(base, adapter)
    for name, value in written.items():
        assert value.dtype == torch.bfloat16
        close = wanted[name].to(torch.bfloat16)
        assert (value.float() - close.float()).abs().max() <= 2**-8 * close.float().abs().max()
    assert json.loads(Path("merged/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_tied_head_that_an_expert_changes_becomes_one_of_its_own(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama", tie=True)
    adapter = tmp_path / "adapter"
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    made: Any = peft.get_peft_model(load_model(base), config)
    made.save_pretrained(adapter, save_embedding_layers=False)
    expertctl("export", add_expert(expertctl, base, adapter), "--merged", "-o", "merged")
    merged, ids = load_model(Path("merged")), torch.tensor([IDS])
    adapted: Any = peft.PeftModel.from_pretrained(load_model(base), str(adapter)).eval()
    with torch.no_grad():
        difference = (merged(ids).logits - adapted(ids).logits).abs().max()
    assert difference < 1e-4
    assert not merged.config.tie_word_embeddings


def test_what_cannot_be_written_is_refused_with_another_way(
    expertctl: CommandRunner, tmp_path: Path, work: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    prompt = add_expert(expertctl, base, write_soft_prompt(tmp_path / "prompt", base))
    for option in ("--merged", "--gguf"):
        said = expertctl("export", prompt, option, "-o", "out", exit_code=4).err
        assert "soft prompt" in said
        assert "--peft" in said
    dora = write_dora(tmp_path / "dora", base)
    expertctl("build", dora, "--base", "acme/base", "-o", "dora.expert")
    assert "--merged" in expertctl("export", "dora.expert", "--gguf", exit_code=4).err
    assert sorted(path.name for path in work.iterdir()) == ["dora.expert", "one.expert"]
    expertctl("base", "remove", "acme/base")
    said = expertctl("export", "dora.expert", "--merged", exit_code=3).err
    assert "which is not known here" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--gguf", "--merged"],
        ["--oci", "--peft"],
        ["--modelfile"],
        ["--merged", "--modelfile"],
        ["--base", "x"],
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], expertctl: CommandRunner
) -> None:
    expertctl("export", "acme/x", *words, exit_code=2)


def pair_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows as files of Llama have them: the two halves of each head in turns."""
    halves = rows.reshape(-1, 2, HEAD_DIM // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def list_wanted(adapter: Path, *, paired: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a GGUF LoRA, by the rules of llama.cpp's converter."""
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    found = {}
    for name, value in load_file(adapter / "adapter_model.safetensors").items():
        *_, layer, _, module, half, _ = name.split(".")
        rows = value.numpy()
        if half == "lora_B" and paired and module in ("q_proj", "k_proj"):
            rows = pair_rows(rows)
        found[f"blk.{layer}.{names[module]}.weight.{half.lower()}"] = rows
    return found


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_gguf_adapter_is_what_the_converter_of_llama_cpp_writes(
    arch: str, expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch=arch)
    adapter = write_lora(tmp_path / "adapter", base, rank=4, alpha=6)
    package = add_expert(expertctl, base, adapter)
    expertctl("export", package, "--gguf", "--modelfile", "-o", "one.gguf")
    reader = gguf.GGUFReader("one.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == arch
    assert (fields["adapter.type"], fields["adapter.lora.alpha"]) == ("lora", 6.0)
    wanted = list_wanted(adapter, paired=arch == "llama")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    lines = Path("Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {base}", "ADAPTER ./one.gguf"]


def test_a_changed_base_is_not_taken_for_the_one_that_was_added(
    expertctl: CommandRunner, tmp_path: Path, work: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    package = add_expert(expertctl, base, write_lora(tmp_path / "adapter", base))
    write_base(base, arch="llama", seed=1)
    for option in ("--merged", "--gguf"):
        said = expertctl("export", package, option, "-o", "out", exit_code=4).err
        assert "model.safetensors" in said
    assert [path.name for path in work.iterdir()] == ["one.expert"]


def test_the_modelfile_needs_a_place_beside_the_adapter(
    expertctl: CommandRunner, tmp_path: Path, work: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    package = add_expert(expertctl, base, write_lora(tmp_path / "adapter", base))
    for place in ("Modelfile", "."):
        expertctl("export", package, "--gguf", "--modelfile", "-o", place, exit_code=2)
    assert [path.name for path in work.iterdir()] == ["one.expert"]


def test_a_modelfile_has_the_settings_of_the_manifest(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    """Ollama reads whole numbers without an exponent, and knows no escapes in quotes."""
    base = write_base(tmp_path / "base", arch="llama")
    adapter = write_lora(tmp_path / "adapter", base)
    decoding = {"temperature": 0.25, "top_k": 1_000_000, "stop": ["END", 'a "b" c', "x\ny", 'z"']}
    (adapter / "expert.json").write_text(json.dumps({"name": "acme/x", "decoding": decoding}))
    package = add_expert(expertctl, base, adapter)
    said = expertctl("export", package, "--gguf", "--modelfile")
    assert "cannot hold the stop text" in said.err
    assert Path("Modelfile").read_text() == (
        f"FROM {base}\nADAPTER ./one.gguf\n"
        "PARAMETER temperature 0.25\nPARAMETER top_k 1000000\n"
        'PARAMETER stop "END"\nPARAMETER stop """a "b" c"""\nPARAMETER stop """x\ny"""\n'
    )


@pytest.mark.parametrize("options", [PATTERNS, {"use_rslora": True}, {"dtype": "bfloat16"}])
def test_factors_of_modules_survive_a_file_with_one_alpha(
    options: dict[str, Any], expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    adapter = write_lora(tmp_path / "adapter", base, rank=4, alpha=6, **options)
    expertctl("export", add_expert(expertctl, base, adapter), "--gguf", "-o", "one.gguf")
    reader = gguf.GGUFReader("one.gguf")
    alpha = reader.fields["adapter.lora.alpha"].contents()
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    model: Any = peft.PeftModel.from_pretrained(load_model(base), str(adapter))
    for name, module in model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        layer, part = name.split(".layers.")[1].split(".")[0], name.rpartition(".")[2]
        stored = {"q_proj": "attn_q", "v_proj": "attn_v", "up_proj": "ffn_up"}.get(part)
        if stored is None:
            continue
        a = found[f"blk.{layer}.{stored}.weight.lora_a"]
        b = found[f"blk.{layer}.{stored}.weight.lora_b"]
        delta = module.get_delta_weight("default").detach().numpy()
        wanted = pair_rows(delta) if part == "q_proj" else delta
        assert np.abs(b @ a * alpha / len(a) - wanted).max() < 1e-5, name


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("alpha", [6.0, 0.0])
def test_a_gguf_adapter_is_built_as_the_folder_it_was_made_from(
    arch: str, alpha: float, expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch=arch)
    adapter = write_lora(tmp_path / "adapter", base, rank=4, alpha=alpha or 4)
    write_adapter_file(tmp_path / "my-sql.gguf", arch, list_wanted(adapter, paired=arch == "llama"),
                       alpha=alpha)  # fmt: skip
    expertctl("base", "add", str(base), "--name", "acme/base")
    built = expertctl("build", tmp_path / "my-sql.gguf", "--base", "acme/base", "--json").document
    assert built["ref"] == "local/my-sql@0.1.0"
    expertctl("export", built["path"], "--peft", "-o", "back")
    config = json.loads(Path("back/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, alpha or 4)
    back, original = (
        load_file("back/adapter_model.safetensors"),
        adapter / "adapter_model.safetensors",
    )
    wanted = load_file(original)
    assert set(back) == set(wanted)
    assert all(torch.equal(back[name], value) for name, value in wanted.items())


def write_adapter_file(
    path: Path, arch: str, tensors: dict[str, np.ndarray[Any, Any]], *, alpha: float, **changed: Any
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    keys = {"general.type": "adapter", "adapter.type": "lora", **changed}
    for key, value in keys.items():
        if value is not None:
            writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


A, B = np.ones((2, 32), np.float32), np.ones((32, 2), np.float32)
Q = "blk.0.attn_q.weight.lora_"


@pytest.mark.parametrize(
    ("tensors", "changed", "code", "words"),
    [
        ({f"{Q}a": A, f"{Q}b": B}, {"alpha": math.nan}, 8, "adapter.lora.alpha is not a finite"),
        ({f"{Q}a": A, f"{Q}b": B}, {"alpha": 1e30}, 8, "adapter.lora.alpha is"),
        ({f"{Q}a": A, f"{Q}b": B}, {"adapter.type": "dora"}, 4, "of type 'dora'"),
        ({f"{Q}a": A, f"{Q}b": B}, {"arch": "qwen3"}, 4, "for the architecture 'qwen3'"),
        ({f"{Q}a": A, f"{Q}b": B}, {"general.type": "model"}, 2, "is a model, not an adapter"),
        ({f"{Q}a": A}, {}, 8, "has only lora_a"),
        ({f"{Q}a": A, f"{Q}b": B[:, :1].copy()}, {}, 8, "lora_a and lora_b are [2, 32]"),
        ({f"{Q}a": A, f"{Q}b": B[:4].copy()}, {}, 8, "no heads of 8"),
        ({f"{Q}a": A, f"{Q}b": B, "x.lora_a": A}, {}, 8, "unexpected tensor x.lora_a"),
        ({f"{Q}a": A[0].copy(), f"{Q}b": B}, {}, 8, "not a matrix"),
        ({f"{Q}a": A, f"{Q}b": B, "token_embd.weight.lora_a": A}, {}, 8, "unexpected tensor"),
        ({}, {}, 8, "tensor count is 0"),
    ],
)
def test_a_gguf_adapter_that_means_nothing_is_refused(
    tensors: dict[str, Any],
    changed: dict[str, Any],
    code: int,
    words: str,
    expertctl: CommandRunner,
    tmp_path: Path,
    work: Path,
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    expertctl("base", "add", str(base), "--name", "acme/base")
    options = {"alpha": 4.0, **changed}
    arch = options.pop("arch", "llama")
    write_adapter_file(tmp_path / "bad.gguf", arch, tensors, **options)
    said = expertctl("build", tmp_path / "bad.gguf", "--base", "acme/base", exit_code=code)
    assert words in said.err
    assert list(work.iterdir()) == []


def test_a_cut_file_is_refused(expertctl: CommandRunner, tmp_path: Path, work: Path) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    expertctl("base", "add", str(base), "--name", "acme/base")
    path = tmp_path / "cut.gguf"
    write_adapter_file(path, "llama", {f"{Q}a": A, f"{Q}b": B}, alpha=4.0)
    path.write_bytes(path.read_bytes()[:-64])
    expertctl("build", path, "--base", "acme/base", exit_code=8)
    assert list(work.iterdir()) == []


def test_the_base_of_a_gguf_adapter_is_asked_for(expertctl: CommandRunner, tmp_path: Path) -> None:
    path, place = tmp_path / "x.gguf", "https://huggingface.co/acme/base"
    named = {"general.base_model.0.repo_url": place}
    write_adapter_file(path, "llama", {f"{Q}a": A, f"{Q}b": B}, alpha=4.0, **named)
    said = expertctl("build", path, exit_code=3).err
    assert "its base acme/base is not known here" in said
    assert "--base NAME" in said
    base = write_base(tmp_path / "base", arch="llama")
    expertctl("base", "add", str(base), "--name", "acme/base")
    assert expertctl("build", path, "--json").document["ref"] == "local/x@0.1.0"


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_llama_cpp_loads_the_adapter_and_computes_what_peft_does(
    arch: str, dtype: str, expertctl: CommandRunner, tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    base = write_base(tmp_path / "base", arch=arch, hidden=64, intermediate=96)
    adapter = write_lora(tmp_path / "adapter", base, rank=4, alpha=6, dtype=dtype)
    expertctl("export", add_expert(expertctl, base, adapter), "--gguf", "-o", "one.gguf")
    model = write_gguf(tmp_path / "base.gguf", base, tokenizer__ggml__merges=["a b"])
    theirs = llama_cpp.Llama(
        str(model),
        lora_path="one.gguf",
        n_ctx=256,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    theirs.eval(IDS)
    found = np.array(theirs.scores[: len(IDS)])
    adapted: Any = peft.PeftModel.from_pretrained(load_model(base), str(adapter)).eval()
    with torch.no_grad():
        wanted = adapted(torch.tensor([IDS])).logits[0].numpy()
        alone = load_model(base)(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(alone - wanted).max() > 0.05 * wanted.std()
    limit = 1e-4 if dtype == "float32" else 0.02
    assert np.abs(found - wanted).max() < limit * wanted.std()


def test_kinds_of_numbers_are_those_of_the_adapter(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    for dtype, kind in (("float16", Kind.F16), ("bfloat16", Kind.BF16)):
        adapter = write_lora(tmp_path / dtype, base, dtype=dtype)
        name = f"{dtype}.expert"
        expertctl("base", "add", str(base), "--name", "acme/base")
        expertctl("build", adapter, "--base", "acme/base", "-o", name)
        expertctl("export", name, "--gguf")
        reader = gguf.GGUFReader(f"{dtype}.gguf")
        assert {tensor.tensor_type for tensor in reader.tensors} == {kind}
