"""``expertctl base profile`` and ``base plan`` as a person types them."""

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.moe.profile_codecs import parse_prompt_counts, read_activity
from expertctl.schema.validation import find_problems
from expertctl.settings import format_size, parse_size
from expertctl.store.quantised_cache import open_quantised_cache
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.family_models import build_family_model
from tests.factories import write_base, write_tokenizer
from tests.quantised_bases import store_mxfp4
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["expertctl", "fast", "package_factory", "user_home"]

pytestmark = pytest.mark.all

BUDGET, SMALL_BUDGET = "90MB", "40MB"


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(
        tmp_path_factory.mktemp("routed") / "moe",
        arch="qwen3_moe",
        tie=False,
        seed=3,
        layers=4,
        hidden=64,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1152,
    )


@pytest.fixture
def learnt(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    base_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A base that answered once in less memory than it takes; its ``moe`` object."""
    monkeypatch.setattr("expertctl.routing.base_dtype.SMALL_BASE", 0)
    user_home.bases.add(base_dir)
    words = ("run", "Sort: 3, 1, 2", "--no-experts", "--greedy", "--max-tokens", "24", "--json")
    options = ("--base", "moe", "--memory-budget", BUDGET, "--moe-warmup", "full")
    return expertctl(*words, *options).document["moe"]


@pytest.mark.parametrize("command", ["profile show", "profile export", "profile import",
                                     "profile forget", "plan"])  # fmt: skip
def test_every_command_has_an_example(command: str, expertctl: CommandRunner) -> None:
    text = expertctl("base", *command.split(), "--help").out
    assert f"expertctl base {command}" in text.split("Example")[1]
    assert "--json" in text


def test_what_was_learnt_is_shown_written_taken_over_and_forgotten(
    learnt: Any, expertctl: CommandRunner, tmp_path: Path
) -> None:
    shown = expertctl("base", "profile", "show", "moe", "--json").document
    assert (shown["experts"], shown["used"], len(shown["layers"])) == (32, 4, 4)
    assert shown["counted"] == "tokens"
    assert shown["tokens"] > 24
    assert "tokens; older ones" in expertctl("base", "profile", "show", "moe").out
    activity, prompts = tmp_path / "activity.json", tmp_path / "prompts.json"
    said = expertctl("base", "profile", "export", "moe", activity)
    assert "history" in said.err
    assert activity.stat().st_mode & 0o777 == 0o600
    expertctl("base", "profile", "export", "moe", prompts, "--kind", "prompts", "--json")
    documents = {p: json.loads(p.read_bytes()) for p in (activity, prompts)}
    assert find_problems(documents[activity], "moe-activity") == []
    assert find_problems(documents[prompts], "moe-profile") == []
    document = json.loads(prompts.read_bytes())
    usage = parse_prompt_counts(document, what="ours")
    found = read_activity(activity.read_bytes(), what="ours")
    assert document["model"] == "moe"
    assert (usage.tokens, usage.counted_preset) == (shown["tokens"], "tokens")
    assert [layer.hits for layer in found.layers] == [dict(c) for c in usage.counts.values()]
    assert expertctl("base", "profile", "forget", "moe", "--json").document["forgotten"]
    assert "there is no usage profile" in expertctl("base", "profile", "show", "moe").out
    expertctl("base", "profile", "export", "moe", activity, exit_code=3)
    for file in (activity, prompts):
        expertctl("base", "profile", "import", "moe", file)
        again = expertctl("base", "profile", "show", "moe", "--json").document
        assert again["layers"] == shown["layers"]
        assert again["tokens"] == shown["tokens"]


def test_a_profile_of_prompts_is_of_as_many_when_it_is_written_again(
    expertctl: CommandRunner, user_home: HomeFixture, base_dir: Path, tmp_path: Path
) -> None:
    user_home.bases.add(base_dir)
    asked = {"0": {"activation_counts": {"3": 20, "5": 4}}, "2": {"activation_counts": {"7": 23}}}
    theirs, first = tmp_path / "theirs.json", tmp_path / "first.json"
    theirs.write_text(
        json.dumps(
            {"num_prompts": 24, "num_experts": 32, "layers": asked, "prompt_preset": "mixed 70/30"}
        )
    )
    expertctl("base", "profile", "import", "moe", theirs)
    shown = expertctl("base", "profile", "show", "moe", "--json").document
    assert (shown["tokens"], shown["counted"]) == (24, "prompts")
    assert "learnt from 24 prompts" in expertctl("base", "profile", "show", "moe").out
    expertctl("base", "profile", "export", "moe", first, "--kind", "prompts")
    usage = parse_prompt_counts(json.loads(first.read_bytes()), what="ours")
    assert (usage.tokens, usage.counted_preset) == (24, "mixed 70/30")
    assert usage.counts == {0: {3: 20, 5: 4}, 2: {7: 23}}
    for kind in ("prompts", "activity"):
        between, again = tmp_path / "between.json", tmp_path / "again.json"
        expertctl("base", "profile", "export", "moe", between, "--kind", kind)
        expertctl("base", "profile", "import", "moe", between)
        expertctl("base", "profile", "export", "moe", again, "--kind", "prompts")
        assert again.read_bytes() == first.read_bytes()


def test_counts_that_fade_at_once_are_not_taken_for_what_was_learnt(
    learnt: Any, expertctl: CommandRunner, tmp_path: Path
) -> None:
    """Of a thousand million prompts one in fifty million asked for an expert."""
    before = expertctl("base", "profile", "show", "moe", "--json").document
    rare = tmp_path / "rare.json"
    asked = {"0": {"activation_counts": {"3": 20}}}
    rare.write_text(json.dumps({"num_prompts": 10**9, "num_experts": 32, "layers": asked}))
    said = expertctl("base", "profile", "import", "moe", rare, exit_code=4)
    assert f"{rare} counts no expert often enough" in "".join(said.err.split("\n"))
    assert "hint: nothing was changed; --moe-profile uses the file as it is" in said.err
    assert expertctl("base", "profile", "show", "moe", "--json").document == before
    plan = ("base", "plan", "moe", "--memory", BUDGET, "--moe-profile", rare, "--json")
    assert expertctl(*plan).document["known"] == str(rare)


def test_a_base_that_is_whole_is_planned_as_it_is_held(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    base_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertctl.routing.base_dtype.SMALL_BASE", 0)
    user_home.bases.add(base_dir)
    words = ("run", "hi", "--base", "moe", "--no-experts", "--max-tokens", "1", "--json")
    for dtype in ("bf16", "int8"):
        memory = expertctl(*words, "--dtype", dtype, "--memory-budget", "1GB").document["memory"]
        plan = expertctl(
            "base", "plan", "moe", "--dtype", dtype, "--memory", "1GB", "--json"
        ).document
        assert (plan["whole"], plan["fits"]) == (True, True)
        assert (plan["slots"], plan["pool"]) == (4 * 32, 0)
        assert plan["planned_bytes"] == memory["base"]
        assert plan["block_bytes"] == plan["expert_bytes"], "no copy is read"


def test_a_base_without_routed_experts_is_planned_in_every_dtype(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "dense", head_dim=16, hidden=64, intermediate=96))
    plan = ("base", "plan", "dense", "--memory", "20MB")
    text = expertctl(*plan).out
    assert text.splitlines()[0] == "dense, 20 MB of memory"
    for dtype, limit in (("int8", 0.05), ("int4", 0.25)):
        assert f"the first run tells  {limit}\n" in f"{text}\n"
        run = ("run", "hi", "--base", "dense", "--no-experts", "--max-tokens", "1", "--json")
        ran = expertctl(*run, "--dtype", dtype, "--memory-budget", "20MB").document
        planned = {each["dtype"]: each for each in expertctl(*plan, "--json").document["dtypes"]}
        assert list(planned) == ["float32", "bf16", "int8", "int4"]
        assert planned[dtype]["weight_bytes"] == ran["memory"]["base"]
        assert planned[dtype]["kl_divergence"] == ran["numerics"]["kl_divergence"] > 0
        assert planned["float32"]["kl_divergence"] is None
        assert all(each["fits"] for each in planned.values())
    assert "the first run tells" not in expertctl(*plan).out
    assert (
        "dense has no routed experts: --lane has no effect"
        in expertctl(*plan, "--lane", "a=1MB").err
    )
    only = expertctl(*plan, "--dtype", "int8", "--json").document["dtypes"]
    assert only == [planned["int8"]]
    least = min(each["min_bytes"] for each in planned.values())
    small = expertctl("base", "plan", "dense", "--memory", str(least - 1), "--json").document
    assert not any(each["fits"] for each in small["dtypes"])


@pytest.mark.parametrize("miss", ["exact", "skip"])
def test_what_routed_experts_lose_is_measured_exactly_and_counts_as_no_use(
    miss: str,
    expertctl: CommandRunner,
    user_home: HomeFixture,
    base_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertctl.routing.base_dtype.SMALL_BASE", 0)
    user_home.bases.add(base_dir)
    run = ("run", "Sort: 3, 1, 2", "--no-experts", "--greedy", "--max-tokens", "8", "--json")
    options = ("--base", "moe", "--dtype", "int8", "--memory-budget", SMALL_BUDGET)
    ran = expertctl(*run, *options, "--moe-miss", miss).document
    assert ran["moe"]["in_memory"] < 4 * 32, "not all of them fit"
    tokens = ran["tokens"]["prompt"] + ran["tokens"]["generated"]
    assert expertctl("base", "profile", "show", "moe", "--json").document["tokens"] <= tokens
    [base] = user_home.bases.list_bases()
    user_home.bases.quality_path(base, "int8").unlink()
    whole = expertctl(*run, "--base", "moe", "--dtype", "int8").document
    found, expected = (each["numerics"]["kl_divergence"] for each in (ran, whole))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_device_that_is_set_plans_no_processor(
    expertctl: CommandRunner, user_home: HomeFixture, base_dir: Path
) -> None:
    user_home.bases.add(base_dir)
    expertctl("config", "set", "device", "cuda")
    said = expertctl("base", "plan", "moe", exit_code=2)
    assert "base plan runs on the CPU only" in said.err
    assert "hint: " in said.err


def test_a_plan_says_how_much_of_what_was_asked_for_is_served(
    learnt: Any, expertctl: CommandRunner, tmp_path: Path
) -> None:
    plan = expertctl("base", "plan", "moe", "--memory", BUDGET, "--json").document
    assert not plan["whole"]
    assert plan["known"] == "the learnt usage of moe"
    assert plan["planned_bytes"] <= 0.71 * 90e6
    assert [layer["slots"] for layer in plan["layers"]] == [learnt["slots"]] * 4
    assert all(0.5 < layer["served"] <= 1 for layer in plan["layers"])
    assert [each["weighting"] for each in plan["weightings"]] == [
        *("flat", "balanced", "pressure", "smooth", "time"),
    ]
    for each in plan["weightings"]:
        (lane,) = each["lanes"]
        assert lane["dummy_bytes"] == 4 * plan["expert_bytes"]
        assert lane["used"] == lane["dummy_bytes"] + lane["experts"] * plan["expert_bytes"]
        assert lane["used"] <= lane["budget"]
    text = expertctl("base", "plan", "moe", "--memory", BUDGET).out
    assert "the pool" in text
    asked = counts_of(expertctl, tmp_path)
    in_slots = [sum(counts[: learnt["slots"]]) for counts in asked]
    others = sorted((n for counts in asked for n in counts[learnt["slots"] :]), reverse=True)
    whole, pool = sum(map(sum, asked)), sum(others[: plan["pool"]])
    assert 0 < plan["pool"] < len(others), "the pool has not room for all of them"
    assert plan["served"] == pytest.approx(sum(in_slots) / whole, abs=1e-6)
    assert plan["served_with_pool"] == pytest.approx((sum(in_slots) + pool) / whole, abs=1e-6)
    both = [f"{100 * plan[name]:.1f} %" for name in ("served", "served_with_pool")]
    assert (
        f"\nslots serve {both[0]} of all uses, and {both[1]} with a pool of the most used" in text
    )
    first = plan["layers"][0]
    assert f"SERVED BY SLOTS  BY {first['slots_even']} EACH\n" in text
    assert re.search(rf"\n0 .*  {100 * first['served_even']:.1f} %\n", text)
    assert max(len(line) for line in text.splitlines()) <= 80


def counts_of(expertctl: CommandRunner, folder: Path) -> list[list[int]]:
    """How often the experts of each layer were asked for, the most asked for first."""
    file = folder / "counts.json"
    expertctl("base", "profile", "export", "moe", file, "--kind", "prompts")
    layers = json.loads(file.read_bytes())["layers"].values()
    return [sorted(layer["activation_counts"].values(), reverse=True) for layer in layers]


def test_the_pool_of_a_plan_is_that_of_a_run_that_has_kept_a_copy(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    base_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertctl.routing.base_dtype.SMALL_BASE", 0)
    user_home.bases.add(base_dir)
    numbers = ("--dtype", "bf16", "--json")
    plan = ("base", "plan", "moe", "--memory-budget", "45MB", *numbers)
    before = expertctl(*plan).document
    assert before["block_bytes"] == before["expert_bytes"]
    assert "a larger pool once" in expertctl(*plan[:-1]).out
    words = ("run", "Sort: 3, 1, 2", "--no-experts", "--greedy", "--max-tokens", "2")
    ran = expertctl(*words, "--base", "moe", "--memory-budget", "45MB", *numbers).document["moe"]
    after = expertctl(*plan).document
    assert 0.68 * after["expert_bytes"] < after["block_bytes"] < 0.8 * after["expert_bytes"]
    assert (after["slots"], after["slots"] + after["pool"]) == (4 * ran["slots"], ran["in_memory"])
    assert after["pool"] > before["pool"]
    assert "a larger pool once" not in expertctl(*plan[:-1]).out
    for each in after["weightings"]:
        (lane,) = each["lanes"]
        assert lane["used"] - lane["dummy_bytes"] == lane["experts"] * after["block_bytes"]
    copies = open_quantised_cache(user_home.bases, user_home.bases.find("moe"))
    assert copies is not None
    path = copies.path(Scheme.BFLOAT16.value)
    path.write_bytes(path.read_bytes()[:-1])
    told = expertctl(*plan[:-1])
    assert "a larger pool once" in told.out
    assert f"{path} is damaged" in "".join(told.err.split("\n")).replace("  ", " ")


def test_a_plan_does_not_check_settings_that_it_does_not_use(
    learnt: Any, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_MOE_COLD", "unknown")
    assert expertctl("base", "plan", "moe", "--memory", BUDGET).out


def test_up_to_three_lanes_are_planned(learnt: Any, expertctl: CommandRunner) -> None:
    lanes = ("--lane", "gpu=10MB", "--lane", "ram=20MB", "--lane", "other=5MB")
    plan = expertctl(
        "base", "plan", "moe", "--memory", BUDGET, *lanes, "--strategy", "hot-even", "--json"
    ).document
    names = [lane["name"] for lane in plan["weightings"][0]["lanes"]]
    assert names == ["gpu", "ram", "other"]
    said = expertctl("base", "plan", "moe", *lanes, "--lane", "fourth=1MB", exit_code=2)
    assert "one to 3 lanes" in said.err
    assert "--lane gpu=6GB" in expertctl("base", "plan", "moe", "--lane", "gpu", exit_code=2).err
    said = expertctl("base", "plan", "moe", *lanes, "--lane", "gpu=1MB", exit_code=2)
    assert "--lane gpu is given twice" in said.err
    long = "g" * 20
    said = expertctl("base", "plan", "moe", "--lane", f"{long}1=1MB", exit_code=2)
    assert f"--lane {long}…: a name of more than 20 characters" in said.err
    plan = expertctl("base", "plan", "moe", "--lane", f"{long}=1MB", "--json").document
    assert plan["weightings"][0]["lanes"][0]["name"] == long
    text = expertctl("base", "plan", "moe", "--memory", "1GB", *lanes).out
    assert "the whole base fits" in text
    assert re.search(r"flat +\d+\.\d %  gpu +\d+ ", text)


def test_a_memory_in_which_no_run_can_begin_is_told_as_one(
    expertctl: CommandRunner, user_home: HomeFixture, base_dir: Path
) -> None:
    user_home.bases.add(base_dir)
    plan = expertctl("base", "plan", "moe", "--memory", "20MB", "--json").document
    assert not plan["fits"]
    least = plan["least_bytes"]
    assert least == plan["planned_bytes"] + plan["texts_bytes"]
    text = expertctl("base", "plan", "moe", "--memory", "20MB").out
    typed = re.search(r"too little: a typical context needs (\d+MB)", text)
    assert typed is not None
    assert 0 <= parse_size(typed[1]) - least < 10**6
    assert format_size(plan["texts_bytes"]) in text
    assert "WEIGHTING" not in text
    run = ("run", "hi", "--base", "moe", "--no-experts", "--dtype", "bf16")
    for dtype, size in (("bf16", "10MB"), ("int8", "5MB")):
        plan = expertctl(
            "base", "plan", "moe", "--dtype", dtype, "--memory", size, "--json"
        ).document
        assert (plan["dtype"], plan["fits"]) == (dtype, False)
    size = format_size(plan["planned_bytes"])
    said = expertctl(*run[:-1], "int8", "--memory-budget", "5MB", exit_code=7).err
    assert f"the base moe: {size} needed" in said
    assert "; `expertctl base plan moe` shows the memory of a typical request" in said
    for memory, fits in ((least - 1, False), (least, True), (typed[1], True), (2 * least, True)):
        plan = expertctl("base", "plan", "moe", "--memory", memory, "--json").document
        assert plan["fits"] is fits
        expertctl(*run[:-2], "--memory-budget", memory, "--json", exit_code=0 if fits else 7)


def test_a_base_of_which_nothing_is_known_is_planned_too(
    expertctl: CommandRunner, user_home: HomeFixture, base_dir: Path
) -> None:
    user_home.bases.add(base_dir)
    plan = expertctl("base", "plan", "moe", "--memory", BUDGET, "--json").document
    assert plan["known"] is None
    assert [each["served"] for each in plan["weightings"]] == [None]
    assert "the whole base fits" in expertctl("base", "plan", "moe", "--memory", "1GB").out
    said = expertctl("base", "plan", "moe", "--memory", BUDGET, "--moe-pin", "4")
    assert "pins no expert" in said.err


def test_a_base_that_is_another_one_now_is_not_planned(
    expertctl: CommandRunner, user_home: HomeFixture, base_dir: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(base_dir, changed)
    user_home.bases.add(changed, name="moe")
    (changed / "model.safetensors").unlink()
    said = expertctl("base", "plan", "moe", "--memory", BUDGET, exit_code=4)
    assert "model.safetensors" in said.err


def test_a_profile_is_written_where_it_was_said(
    learnt: Any, expertctl: CommandRunner, tmp_path: Path
) -> None:
    """A pipe stays one, and so does a link; root may replace /dev/stdout."""
    export = ("base", "profile", "export", "moe")
    plain, pipe, link = tmp_path / "plain.json", tmp_path / "pipe", tmp_path / "link"
    expertctl(*export, plain)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        expertctl(*export, pipe)
        through = json.loads(read.result())
    assert through["layers"] == json.loads(plain.read_bytes())["layers"]
    assert pipe.is_fifo()
    link.symlink_to("there.json")
    expertctl(*export, link)
    assert link.is_symlink()
    assert read_activity((tmp_path / "there.json").read_bytes(), what="there").is_usable


def test_a_profile_that_has_no_room_says_so(learnt: Any, expertctl: CommandRunner) -> None:
    said = expertctl("base", "profile", "export", "moe", "/dev/full", exit_code=7)
    assert "/dev/full: no space left" in said.err
    assert "hint: free some space, or name a file elsewhere" in said.err


def test_more_pins_than_slots_want_memory_by_no_option_that_is_not_there(
    learnt: Any, expertctl: CommandRunner
) -> None:
    said = expertctl("base", "plan", "moe", "--memory", BUDGET, "--moe-pin", "30", exit_code=2)
    assert "hint: pin fewer experts, or give more memory" in said.err
    assert "--memory-budget" not in said.err


def test_gpt_oss_in_mxfp4_is_planned_and_run_in_numpy(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 8}
    build_family_model(
        tmp_path / "oss",
        "gpt_oss",
        num_experts_per_tok=2,
        max_position_embeddings=256,
        **sizes,
    )
    write_tokenizer(tmp_path / "oss")
    store_mxfp4(tmp_path / "oss")
    added = expertctl("base", "add", str(tmp_path / "oss")).out
    assert "stored as F32, MXFP4; held in float32 by default" in added
    run = ("run", "hi", "--base", "oss", "--no-experts", "--max-tokens", "2")
    ran = expertctl(*run, "--json").document
    told = expertctl("base", "plan", "oss", "--lane", "a=1MB", "--json")
    planned = {each["dtype"]: each for each in told.document["dtypes"]}
    assert list(planned) == ["float32", "bf16"]
    assert planned["float32"]["weight_bytes"] == ran["memory"]["base"]
    assert "no routed experts that could stay on the disk: --lane has no effect" in told.err
    assert "int8 cannot run it: the kernels cannot run the architecture gpt_oss" in told.err


def test_options_for_routed_experts_have_no_effect_on_a_base_without_any(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    package_factory: PackageFactory,
    tmp_path: Path,
) -> None:
    user_home.bases.add(package_factory.base_dir)
    profile = tmp_path / "profile.json"
    profile.write_text('{"num_prompts": 1, "num_experts": 64, "layers": {}}')
    run = ("run", "hi", "--base", "tiny-base", "--no-experts", "--max-tokens", "1", "--json")
    expertctl("config", "set", "moe_warmup", "full")
    expertctl("config", "set", "moe_cold", "map")
    assert "routed experts" not in str(expertctl(*run).document["warnings"])
    given = {"--moe-profile": str(profile), "--moe-pin": "2", "--moe-miss": "skip"}
    told = expertctl(*run, *(word for pair in given.items() for word in pair)).document["warnings"]
    for option in given:
        assert f"tiny-base has no routed experts: {option} has no effect" in told


def test_what_cannot_be_is_refused_with_a_way_out(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    base_dir: Path,
    package_factory: PackageFactory,
    tmp_path: Path,
) -> None:
    user_home.bases.add(base_dir)
    user_home.bases.add(package_factory.base_dir)
    assert "no routed experts" in expertctl("base", "profile", "show", "tiny-base", exit_code=4).err
    expertctl("base", "plan", "missing", exit_code=3)
    other = tmp_path / "other.json"
    other.write_text('{"num_prompts": 1, "num_experts": 64, "layers": {}}')
    assert "has 64 routed" in expertctl("base", "profile", "import", "moe", other, exit_code=4).err
    other.write_text("{")
    said = expertctl("base", "profile", "import", "moe", other, exit_code=8)
    assert "hint: name a profile: `expertctl base profile export`" in said.err
    expertctl("base", "plan", "moe", "--moe-profile", tmp_path / "gone.json", exit_code=3)
    run = ("run", "hi", "--base", "moe", "--no-experts")
    assert "50%" in expertctl(*run, "--moe-pin", "half", exit_code=2).err
    assert "share" in expertctl(*run, "--moe-exchange", "1.5", exit_code=2).err
