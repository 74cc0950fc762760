"""Whether an expert fits a base: the rule of each digest, and the shapes of modules."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.digest import Digest
from expertctl.errors import BaseMismatchError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.adapter_files import read_adapter
from expertctl.package.base_model import BaseFacts
from expertctl.package.compatibility import check_expert_base, check_tensors
from expertctl.package.model_config import read_model_config
from expertctl.package.read import read_package
from expertctl.schema.manifest import Manifest
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt

OTHER = Digest.compute(b"other")


@pytest.fixture
def manifest(package: Path) -> Manifest:
    return read_package(package).manifest


def requiring(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, base=replace(manifest.base, **changes))


def test_the_same_base_fits_without_a_word(manifest: Manifest, facts: BaseFacts) -> None:
    assert check_expert_base(manifest, facts.identity) == []


@pytest.mark.parametrize(
    ("field", "word"),
    [("arch", "architecture"), ("canonical_tokenizer", "tokenizer"), ("weights", "weights")],
)
def test_another_digest_is_refused_and_named(
    field: str, word: str, manifest: Manifest, facts: BaseFacts
) -> None:
    other = replace(facts.identity, **{field: OTHER})
    with pytest.raises(BaseMismatchError, match=f"the {word} differ") as caught:
        check_expert_base(manifest, other)
    could_work = field != "arch"  # another architecture has other modules, as far as is known here
    assert ("--allow-base-mismatch" in caught.value.hint) == could_work
    (warning,) = check_expert_base(manifest, other, allow_mismatch=True)
    assert word in warning


def of_version_1(manifest: Manifest, facts: BaseFacts) -> Manifest:
    """The manifest as releases before version 2 built it."""
    return requiring(manifest, tokenizer=str(facts.identity.tokenizer), tokenizer_version=1)


def test_a_package_of_version_1_fits_the_file_that_it_was_made_for(
    manifest: Manifest, facts: BaseFacts
) -> None:
    old = of_version_1(manifest, facts)
    assert check_expert_base(old, facts.identity) == []
    assert check_expert_base(old, replace(facts.identity, canonical_tokenizer=None)) == []


def test_a_package_of_version_1_cannot_tell_a_file_that_was_saved_again(
    manifest: Manifest, facts: BaseFacts
) -> None:
    old, saved_again = of_version_1(manifest, facts), replace(facts.identity, tokenizer=OTHER)
    with pytest.raises(BaseMismatchError, match=r"or was saved again.*\(version 1\)"):
        check_expert_base(old, saved_again)
    assert check_expert_base(manifest, saved_again) == []
    (warning,) = check_expert_base(old, saved_again, allow_mismatch=True)
    assert "base mismatch allowed" in warning


def test_a_base_whose_tokenizer_changed_since_it_was_added_fits_no_package_of_version_2(
    manifest: Manifest, facts: BaseFacts
) -> None:
    with pytest.raises(BaseMismatchError, match="changed since it was added"):
        check_expert_base(manifest, replace(facts.identity, canonical_tokenizer=None))


def test_a_base_whose_weights_nobody_read_does_not_fit(
    manifest: Manifest, facts: BaseFacts
) -> None:
    with pytest.raises(BaseMismatchError, match="weights"):
        check_expert_base(manifest, replace(facts.identity, weights=None))


def test_further_weights_that_the_publisher_tested_fit(
    manifest: Manifest, facts: BaseFacts
) -> None:
    tested = requiring(manifest, accepts=(str(OTHER),))
    (said,) = check_expert_base(tested, replace(facts.identity, weights=OTHER))
    assert "its manifest accepts the weights of" in said
    assert check_expert_base(tested, facts.identity) == []
    with pytest.raises(BaseMismatchError):
        check_expert_base(tested, replace(facts.identity, weights=OTHER, arch=OTHER))


def test_names_do_not_matter_where_weights_are_stated(manifest: Manifest, facts: BaseFacts) -> None:
    assert (
        check_expert_base(manifest, replace(facts.identity, name="mirror/x", revision="abc")) == []
    )


def test_without_weights_name_and_revision_must_be_equal_and_it_is_said(
    manifest: Manifest, facts: BaseFacts
) -> None:
    unstated = requiring(manifest, weights=None, name="a/b", revision="r1")
    same = replace(facts.identity, name="a/b", revision="r1", weights=OTHER)
    (warning,) = check_expert_base(unstated, same)
    assert "not checked" in warning
    for changes in ({"name": "c/d"}, {"revision": "r2"}, {"revision": None}):
        with pytest.raises(BaseMismatchError, match="states no digest"):
            check_expert_base(unstated, replace(same, **changes))


def test_tensors_are_held_to_the_layers_of_the_base(
    package: Path, base_dir: Path, tmp_path: Path
) -> None:
    (spec,) = read_package(package).adapters
    assert check_tensors(spec, read_model_config(base_dir).linear_shapes()) == []
    wider = write_base(tmp_path / "wider", hidden=64, intermediate=48)
    assert check_tensors(spec, read_model_config(wider).linear_shapes(), base="wider") == [
        "made for hidden size 32; wider has 64"
    ]
    shallow = write_base(tmp_path / "shallow", layers=1)
    assert check_tensors(spec, read_model_config(shallow).linear_shapes()) == [
        "model.layers.1.mlp.down_proj and 6 more: the base has no such linear layer"
    ]


Factory = Callable[..., Path]
Shapes = dict[str, tuple[int, int]]


def spec_of(files: Path) -> AdapterSpec:
    return read_adapter(
        files, weights="adapter_model.safetensors", config="adapter_config.json"
    ).spec


@pytest.fixture
def shapes(base_dir: Path) -> Shapes:
    return dict(read_model_config(base_dir).linear_shapes())


@pytest.mark.parametrize("write", [write_lora, write_dora, write_ia3, write_soft_prompt])
def test_every_kind_fits_the_base_that_it_was_made_for(
    write: Factory, base_dir: Path, shapes: Shapes, tmp_path: Path
) -> None:
    assert check_tensors(spec_of(write(tmp_path / "x", base_dir)), shapes) == []


def test_a_dora_is_held_to_the_layers_of_the_base(
    base_dir: Path, shapes: Shapes, tmp_path: Path
) -> None:
    spec = spec_of(write_dora(tmp_path / "x", base_dir, targets=("k_proj",)))
    module = "model.layers.1.self_attn.k_proj"
    shapes[module] = (8, 32)
    assert check_tensors(spec, shapes) == [f"{module}: made for 16 x 32, the base has 8 x 32"]
    del shapes[module]
    assert check_tensors(spec, shapes) == [f"{module}: the base has no such linear layer"]


def test_factors_are_as_many_as_the_side_that_they_scale(
    base_dir: Path, shapes: Shapes, tmp_path: Path
) -> None:
    spec = spec_of(write_ia3(tmp_path / "x", base_dir))
    value, down = "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"
    shapes |= {value: (16, 99), down: (99, 48)}
    assert check_tensors(spec, shapes) == []
    shapes |= {value: (17, 32), down: (32, 47)}
    assert check_tensors(spec, shapes) == [
        f"{down}: made for 48 inputs, the base has 47 inputs",
        f"{value}: made for 16 outputs, the base has 17 outputs",
    ]
    del shapes[down]
    assert f"{down}: the base has no such linear layer" in check_tensors(spec, shapes)


def test_a_soft_prompt_is_as_wide_as_the_tokens_of_the_base(base_dir: Path, tmp_path: Path) -> None:
    spec = spec_of(write_soft_prompt(tmp_path / "x", base_dir))
    wider = write_base(tmp_path / "wider", hidden=64, head_dim=8)
    (problem,) = check_tensors(spec, read_model_config(wider).linear_shapes())
    assert problem == "prompt_embeddings: 32 wide, the base's tokens are 64"
    assert len(check_tensors(spec, {})) == 1


def test_no_module_at_all_is_a_problem_and_never_silence(package: Path) -> None:
    (spec,) = read_package(package).adapters
    assert check_tensors(spec, {}) == [
        "model.layers.0.mlp.down_proj and 13 more: the base has no such linear layer"
    ]
