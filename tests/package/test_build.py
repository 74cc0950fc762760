"""BUILD: what is inferred, what is refused, and that all problems come at once."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import (
    BuildPlan,
    BuildResult,
    build_package,
    draft_manifest,
    plan_build,
)
from expertctl.package.draft import ManifestOverrides
from expertctl.package.read import read_package
from expertctl.package.tensor_file import read_table
from expertctl.reference import hash_file
from expertctl.trust.keys import PrivateKey
from tests.factories import (
    write_base,
    write_lora,
    write_safetensors,
)

PEM = "-----BEGIN {}PRIVATE KEY-----\nMIG\n"


def planned(directory: Path, facts: BaseFacts | None, **said: str) -> BuildPlan:
    return plan_build(directory, ManifestOverrides(**said), base=facts)


def built(directory: Path, facts: BaseFacts, key: PrivateKey | None = None) -> BuildResult:
    return build_package(planned(directory, facts), directory.parent / "out.expert", key=key)


def refused(directory: Path, facts: BaseFacts | None, **said: str) -> str:
    """The message; and nothing was written."""
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(InvalidPackageError) as caught:
        planned(directory, facts, **said)
    assert sorted(directory.parent.rglob("*")) == before
    return caught.value.message


def write_manifest(directory: Path, document: Any) -> None:
    (directory / "expert.json").write_text(json.dumps(document))


def test_a_bare_peft_directory_becomes_a_package(lora: Path, facts: BaseFacts) -> None:
    result = built(lora, facts)
    contents = read_package(result.path)
    manifest = contents.manifest
    assert (manifest.name, manifest.version) == ("local/my-lora", "0.1.0")
    assert manifest.base.name == "tiny"
    assert manifest.base.arch == str(facts.identity.arch)
    assert manifest.base.weights == str(facts.identity.weights)
    assert manifest.base.tokenizer == str(facts.identity.canonical_tokenizer)
    assert manifest.base.tokenizer_version == 2
    (entry,) = manifest.adapters
    assert (entry.kind, entry.rank, entry.dtype, entry.tensors) == ("lora", 4, "float32", 28)
    assert result.signer is None
    assert (result.content_digest, result.package_digest) == (
        contents.content_digest,
        contents.package_digest,
    )
    assert not (lora / "expert.json").exists()


def test_flags_win_over_the_manifest_and_the_manifest_over_the_files(
    lora: Path, facts: BaseFacts
) -> None:
    write_manifest(lora, {"name": "acme/sql", "version": "2.0.0", "license": "MIT", "x-team": "a"})
    manifest = planned(lora, facts, version="3.1.4", description="Writes SQL.").manifest
    assert manifest.ref == "acme/sql@3.1.4"
    assert (manifest.license, manifest.description) == ("MIT", "Writes SQL.")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("My LoRA", "local/my-lora"),
        ("été_2024..v2", "local/ete-2024-v2"),
        ("---", "local/expert"),
        ("x" * 200, f"local/{'x' * 64}"),
    ],
)
def test_the_default_name_is_made_of_the_directory(
    name: str, expected: str, lora: Path, facts: BaseFacts
) -> None:
    moved = Path(shutil.move(lora, lora.parent / name))
    assert planned(moved, facts).manifest.name == expected


def test_a_complete_manifest_is_packed_byte_by_byte(lora: Path, facts: BaseFacts) -> None:
    document = draft_manifest(lora, ManifestOverrides(name="acme/x", license="MIT"), base=facts)
    text = json.dumps(document, indent=7).encode()
    (lora / "expert.json").write_bytes(text)
    assert planned(lora, facts).document == text
    assert planned(lora, None).document == text


def test_a_draft_is_a_manifest_that_builds(lora: Path, facts: BaseFacts) -> None:
    document = draft_manifest(lora, ManifestOverrides(), base=facts)
    write_manifest(lora, document)
    assert read_package(built(lora, facts).path).manifest.routing.task == "default"
    assert document["name"] == "local/my-lora"


def test_a_draft_without_a_base_says_the_name_that_peft_wrote(
    lora_template: Path, lora: Path
) -> None:
    config = json.loads((lora / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "revision": "c1899de"}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    document = draft_manifest(lora, ManifestOverrides(), base=None)
    assert document["base"] == {"name": "Qwen/Qwen3-0.6B", "revision": "c1899de"}


def test_without_a_known_base_the_build_says_how_to_get_one(lora: Path) -> None:
    message = refused(lora, None)
    assert "expertctl base add DIR" in message
    assert "--base DIR" in message


def test_a_manifest_that_states_the_base_needs_none_and_it_is_said(
    lora: Path, facts: BaseFacts
) -> None:
    write_manifest(lora, draft_manifest(lora, ManifestOverrides(), base=facts))
    plan = planned(lora, None)
    assert plan.manifest.base.name == "tiny"
    assert any("not checked" in warning for warning in plan.warnings)


def test_another_base_than_the_manifest_states_is_refused(
    lora: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    write_manifest(lora, draft_manifest(lora, ManifestOverrides(), base=facts))
    other = read_base(write_base(tmp_path / "other", seed=1))
    assert "the weights differ" in refused(lora, other)


def test_tensors_are_held_to_the_base(lora: Path, tmp_path: Path) -> None:
    message = refused(lora, read_base(write_base(tmp_path / "deep", layers=1)))
    assert "model.layers.1.mlp.down_proj and 6 more: the base has no such linear layer" in message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_refused(
    dtype: str, value: float, lora: Path, facts: BaseFacts
) -> None:
    tensors = read_table(lora / "adapter_model.safetensors").tensors
    arrays = {name: np.ones(tensor.shape, np.float32) for name, tensor in tensors.items()}
    bad = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    arrays[bad][-1, -1] = value
    write_safetensors(lora / "adapter_model.safetensors", arrays, dtype=dtype)
    assert refused(lora, facts).endswith(f"{bad} holds NaN or infinity")


def test_all_problems_come_at_once(lora: Path, facts: BaseFacts) -> None:
    write_manifest(lora, {"name": "Not A Name", "unknown": 1, "version": "1"})
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "bias": "all", "foo": 1}))
    message = refused(lora, facts)
    for text in ("name", "unknown", "version", "bias", "foo"):
        assert text in message


def test_an_unknown_base_does_not_hide_other_problems(lora: Path) -> None:
    write_manifest(lora, {"unknown": 1})
    message = refused(lora, None, version="x")
    assert all(text in message for text in ("--base DIR", "unknown", "version"))


@pytest.mark.parametrize(
    ("key", "value"), [("rank", 8), ("dtype", "bfloat16"), ("tensors", 1), ("kind", "dora")]
)
def test_a_manifest_that_contradicts_the_files_is_refused(
    key: str, value: object, lora: Path, facts: BaseFacts
) -> None:
    document: Any = draft_manifest(lora, ManifestOverrides(), base=facts)
    document["adapters"][0][key] = value
    write_manifest(lora, document)
    assert str(value) in refused(lora, facts)


def test_only_known_files_are_packed(lora: Path, facts: BaseFacts) -> None:
    for name in ("README.md", "LICENSE", "optimizer.pt", "train.py", ".env"):
        (lora / name).write_text("text")
    (lora / "checkpoint-100").mkdir()
    plan = planned(lora, facts)
    assert plan.paths == (
        "LICENSE", "README.md", "adapter_config.json", "adapter_model.safetensors",
    )  # fmt: skip
    assert plan.left_out == (".env", "checkpoint-100", "optimizer.pt", "train.py")


def test_files_that_the_manifest_names_are_packed(lora: Path, facts: BaseFacts) -> None:
    (lora / "chat.jinja").write_text("{{ x }}")
    (lora / "sql.gbnf").write_text("root ::= 1")
    write_manifest(lora, {"decoding": {"chat_template": "chat.jinja", "grammar": "sql.gbnf"}})
    assert {"chat.jinja", "sql.gbnf"} <= set(planned(lora, facts).paths)


def test_a_signature_that_is_there_cannot_be_named(lora: Path, facts: BaseFacts) -> None:
    (lora / "model.sig").write_bytes(b"{}")
    write_manifest(lora, {"decoding": {"grammar": "model.sig"}})
    assert "model.sig is the signature" in refused(lora, facts)


def test_a_named_file_that_is_missing_is_refused(lora: Path, facts: BaseFacts) -> None:
    write_manifest(lora, {"decoding": {"grammar": "sql.gbnf"}})
    assert "sql.gbnf is named in expert.json but missing" in refused(lora, facts)


@pytest.mark.parametrize("path", ["../secret.gbnf", "/etc/passwd", "a/b"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(
    path: str, lora: Path, facts: BaseFacts
) -> None:
    write_manifest(lora, {"decoding": {"grammar": path}})
    assert "grammar" in refused(lora, facts)
    write_manifest(lora, {"adapters": [{"kind": "lora", "path": path, "config": path}]})
    assert "adapters" in refused(lora, facts)


def test_a_readme_that_is_not_utf_8_is_not_packed(lora: Path, facts: BaseFacts) -> None:
    (lora / "README.md").write_bytes("für alle".encode("latin-1"))
    assert "README.md: not UTF-8 at byte 1" in refused(lora, facts)


@pytest.mark.parametrize("kind", ["", "EC ", "RSA ", "OPENSSH ", "ENCRYPTED "])
@pytest.mark.parametrize("name", ["README.md", "LICENSE", "adapter_config.json", "expert.json"])
def test_a_private_key_is_never_packed(kind: str, name: str, lora: Path, facts: BaseFacts) -> None:
    path = lora / name
    if name.endswith(".json"):
        document = json.loads(path.read_text()) if path.exists() else {}
        field = "revision" if name == "adapter_config.json" else "x-note"
        path.write_text(json.dumps({**document, field: PEM.format(kind)}))
    else:
        path.write_text(f"text\n{PEM.format(kind)}")
    assert f"{name}: holds a private key" in refused(lora, facts)


def test_a_private_key_that_is_not_packed_does_no_harm(lora: Path, facts: BaseFacts) -> None:
    (lora / "me.pem").write_text(PEM.format(""))
    assert planned(lora, facts).left_out == ("me.pem",)


@pytest.mark.parametrize("name", ["README.md", "adapter_model.safetensors", "adapter_config.json"])
def test_links_are_not_followed(name: str, lora: Path, facts: BaseFacts, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    if (lora / name).exists():
        shutil.move(lora / name, target)
    else:
        target.write_text("secret")
    (lora / name).symlink_to(target)
    assert "link" in refused(lora, facts)


def test_a_pipe_among_the_files_is_refused(lora: Path, facts: BaseFacts) -> None:
    (lora / "chat.jinja").unlink(missing_ok=True)
    os.mkfifo(lora / "chat.jinja")
    write_manifest(lora, {"decoding": {"chat_template": "chat.jinja"}})
    assert "chat.jinja: not a regular file" in refused(lora, facts)


def rename_to_pickle(lora: Path) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")


def fill_with_pickle(lora: Path) -> None:
    (lora / "adapter_model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(99))


@pytest.mark.parametrize("change", [rename_to_pickle, fill_with_pickle])
def test_pickled_weights_are_never_opened(
    change: Callable[[Path], None], lora: Path, facts: BaseFacts
) -> None:
    change(lora)
    assert "adapter_model" in refused(lora, facts)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_without_an_adapter_is_refused(name: str, lora: Path, facts: BaseFacts) -> None:
    (lora / name).unlink()
    assert f"{name} is missing" in refused(lora, facts)
    with pytest.raises(NotFoundError, match=name):
        draft_manifest(lora, ManifestOverrides(), base=facts)


def test_a_missing_directory_is_not_found(tmp_path: Path, facts: BaseFacts) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        planned(tmp_path / "none", facts)


@pytest.mark.parametrize("text", ["[]", "{", "\xff", '{"a": 1, "a": 1}'])
def test_a_manifest_that_is_no_json_object_is_refused(
    text: str, lora: Path, facts: BaseFacts
) -> None:
    (lora / "expert.json").write_bytes(text.encode("latin-1"))
    assert "expert.json" in refused(lora, facts)


def test_the_same_files_and_key_give_the_same_package(
    lora: Path, facts: BaseFacts, key: PrivateKey
) -> None:
    one = built(lora, facts, key)
    data = one.path.read_bytes()
    two = built(lora, facts, key)
    assert two.path.read_bytes() == data
    assert (one.content_digest, one.package_digest) == (two.content_digest, two.package_digest)


def test_signing_changes_only_the_package_digest(
    lora: Path, facts: BaseFacts, key: PrivateKey
) -> None:
    plain, signed = built(lora, facts), built(lora, facts, key)
    assert plain.content_digest == signed.content_digest
    assert plain.package_digest != signed.package_digest
    assert signed.signer == key.public.key_id


def test_a_file_that_changes_while_it_is_packed_is_found_out(lora: Path, facts: BaseFacts) -> None:
    plan = planned(lora, facts)
    path, seen = lora / "adapter_model.safetensors", [0]

    def change(count: int) -> None:
        seen[0] += count
        if seen[0] == plan.size:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    with pytest.raises(DigestError, match="changed while it was packed"):
        build_package(plan, lora.parent / "out.expert", progress=change)
    assert not list(lora.parent.glob("*out*"))


def test_progress_counts_hashing_and_packing(lora: Path, facts: BaseFacts) -> None:
    plan = planned(lora, facts)
    counted: list[int] = []
    build_package(plan, lora.parent / "out.expert", progress=counted.append)
    assert sum(counted) == 2 * plan.size + len(plan.document)


def test_an_output_directory_that_is_missing_is_named(lora: Path, facts: BaseFacts) -> None:
    with pytest.raises(NotFoundError, match="none"):
        build_package(planned(lora, facts), lora.parent / "none" / "out.expert")


def test_two_adapters_in_one_manifest_are_both_checked(
    base_dir: Path, lora: Path, facts: BaseFacts
) -> None:
    second = write_lora(lora.parent / "second", base_dir, rank=2, targets=("q_proj",), seed=5)
    shutil.copy(second / "adapter_model.safetensors", lora / "b.safetensors")
    shutil.copy(second / "adapter_config.json", lora / "b.json")
    document: Any = draft_manifest(lora, ManifestOverrides(), base=facts)
    entry = {"path": "b.safetensors", "config": "b.json", "rank": 2, "tensors": 4}
    document["adapters"].append({**document["adapters"][0], **entry})
    write_manifest(lora, document)
    contents = read_package(built(lora, facts).path)
    assert [spec.rank for spec in contents.adapters] == [4, 2]
    document["adapters"][1]["rank"] = 3
    write_manifest(lora, document)
    assert "b.safetensors: expert.json says rank 3, the files say 2" in refused(lora, facts)


def test_what_is_packed_is_what_was_there(lora: Path, facts: BaseFacts) -> None:
    config = json.loads((lora / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "acme/tiny"  # a path would be left out
    (lora / "adapter_config.json").write_text(json.dumps(config))
    result = built(lora, facts)
    for file in result.files:
        if file.path != "expert.json":
            assert (file.size, file.digest) == hash_file(lora / file.path)


def test_a_base_without_weights_digest_is_left_unstated(lora: Path, facts: BaseFacts) -> None:
    unread = replace(facts, identity=replace(facts.identity, weights=None))
    plan = planned(lora, unread)
    assert plan.manifest.base.weights is None
    assert any("not checked" in warning for warning in plan.warnings)
