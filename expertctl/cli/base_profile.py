"""``expertctl base profile`` and ``base plan``: usage profiles of routed experts.

A usage profile counts how often the router of each layer selected each expert. It is learnt by
runs on this machine or imported from a file, and kept only on this machine. Text output fits into
80 columns.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.completion import complete_bases
from expertctl.cli.engine import guard_engine_import
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_percent,
    format_table,
    note,
    warn,
    write_file,
)
from expertctl.cli.run_options import (
    DtypeOption,
    EngineFlags,
    MoePin,
    MoeProfile,
    NumericsFlags,
    WarmupFlags,
    check_cpu_only,
)
from expertctl.engine_config import KL_LIMITS, QUANTISED_DTYPES, Dtype
from expertctl.errors import ExpertError, IncompatibleError, NotFoundError, UsageError
from expertctl.settings import format_limit, format_size, load_settings, parse_size
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import UsageProfileFile

if TYPE_CHECKING:
    from expertctl.engine.moe.base_plan import BaseMemoryPlan, DenseMemoryPlan, WeightedPlan
    from expertctl.engine.moe.usage_profile import UsageProfile
    from expertctl.package.architectures import ExpertsConfig


_MEGABYTE = 10**6
_SHOWN_EXPERTS = 8
"""How many experts of a layer are shown."""


def build_profile_document(
    base: str, routed: "ExpertsConfig", profile: "UsageProfile | None"
) -> dict[str, object]:
    """Return the document of ``base profile show --json``."""
    layers = {} if profile is None else profile.counts
    return {
        "base": base,
        "experts": routed.count,
        "used": routed.used,
        "tokens": 0 if profile is None else profile.tokens,
        "counted": "tokens" if profile is None else f"{_name_counted_unit(profile)}s",
        "layers": [
            {
                "layer": number,
                "asked": len(layers.get(number, {})),
                "first": [] if profile is None else profile.rank_experts(number),
            }
            for number in routed.layers
        ],
    }


def format_profile(base: str, routed: "ExpertsConfig", profile: "UsageProfile | None") -> str:
    """Return a usage profile as text."""
    if profile is None:
        return f"there is no usage profile of {base}: runs with native kernels record one"
    head = ["LAYER", "USED", "MOST USED EXPERTS"]
    rows = [
        [
            str(number),
            f"{len(profile.layer_counts(number))} of {routed.count}",
            " ".join(map(str, profile.rank_experts(number)[:_SHOWN_EXPERTS])),
        ]
        for number in routed.layers
    ]
    learnt = f"{base}: learnt from {format_count(profile.tokens, _name_counted_unit(profile))}"
    return f"{learnt}; older ones count less\n\n{format_table(head, rows)}"


def _name_counted_unit(usage: "UsageProfile") -> str:
    """Return the unit of the profile's counts: token or prompt."""
    from expertctl.engine.moe.usage_profile import TOKENS_PRESET

    return "token" if usage.counted_preset == TOKENS_PRESET else "prompt"


def format_routed_plan(plan: "BaseMemoryPlan") -> str:
    """Return a memory plan as text."""
    return "\n".join(_format_plan_lines(plan))


def format_dense_plan(plan: "DenseMemoryPlan") -> str:
    """Return how a base without routed experts fits, as a table of data types."""
    rows = [
        [
            each.dtype,
            format_size(each.weight_bytes),
            format_size(each.min_bytes),
            "yes" if plan.fits(each) else "no",
            *_format_loss(each.dtype, each.kl_divergence),
        ]
        for each in plan.dtypes
    ]
    head = ["DTYPE", "WEIGHTS", "A TYPICAL RUN", "FITS", "KL DIVERGENCE", "LIMIT"]
    return f"{plan.base}, {format_limit(plan.limit)} of memory\n\n{format_table(head, rows)}"


def _format_loss(dtype: "Dtype", loss: float | None) -> tuple[str, str]:
    """Return what a base loses in a data type, and what it may lose; nothing for floats."""
    if dtype not in QUANTISED_DTYPES:
        return "", ""
    return "the first run tells" if loss is None else f"{loss:.2g}", str(KL_LIMITS[dtype])


def _format_plan_lines(plan: "BaseMemoryPlan") -> Iterator[str]:
    yield f"{plan.base} in {plan.dtype}, {format_limit(plan.limit)} of memory"
    if loss := _format_loss(plan.dtype, plan.kl_divergence):
        yield f"KL divergence from its own weights: {loss}"
    if plan.whole:
        yield "the whole base fits"
    elif not plan.fits:
        least = f"{-(-plan.min_bytes // _MEGABYTE)}MB"  # in the form of the option
        yield f"that is too little: a typical context needs {least}; a shorter one needs less"
        yield from _format_memory_parts(plan)
    else:
        yield from _format_memory_parts(plan)
        yield from _format_layers(plan)
    if plan.has_lanes:
        yield from _format_lanes(plan)


def _format_memory_parts(plan: "BaseMemoryPlan") -> Iterator[str]:
    slots, pool, size = sum(plan.plan.capacities), plan.pool_blocks, plan.block_bytes
    yield f"  {format_size(plan.other_bytes):>10}  everything except routed experts"
    yield f"  {format_size(slots * size):>10}  {slots} slots of {format_size(size)}"
    yield f"  {format_size(pool * size):>10}  the pool: {pool} experts without a slot"
    text = f"{format_size(plan.sequence_bytes):>10}"
    yield f"  {text}  a typical context: its KV cache and the buffers to read it"
    if plan.can_grow:
        yield "              a larger pool once a run has stored its compact copy of the experts"


def _format_layers(plan: "BaseMemoryPlan") -> Iterator[str]:
    even = plan.layers[0].even_slots
    source = "none yet" if plan.usage_source is None else plan.usage_source
    yield ""
    yield f"usage profile: {source}"
    yield format_table(
        ["LAYER", "SLOTS", "PINNED", "USED", "SERVED BY SLOTS", f"BY {even} EACH"],
        [
            [
                str(each.layer),
                str(each.slots),
                str(each.pinned),
                f"{each.requested_experts} of {plan.plan.experts}",
                format_percent(each.served_share),
                format_percent(each.even_served_share),
            ]
            for each in plan.layers
        ],
    )
    if plan.served_share is not None and plan.pool_blocks:
        yield (
            f"slots serve {format_percent(plan.served_share)} of all uses, and "
            f"{format_percent(plan.served_with_pool)} with a pool of the most used experts"
        )


def _format_lanes(plan: "BaseMemoryPlan") -> Iterator[str]:
    yield ""
    yield "the lanes, by weighting; only planned, as a run uses one lane"
    yield "a layer with experts in a lane needs one more there, a dummy of zeros"
    yield format_table(
        ["WEIGHTING", "SERVED", "LANE", "EXPERTS", "BYTES", "OF WHICH DUMMIES"],
        [row for each in plan.weightings for row in _build_lane_rows(each)],
    )


def _build_lane_rows(each: "WeightedPlan") -> Iterator[list[str]]:
    for number, lane in enumerate(each.lanes):
        first = [each.weighting, format_percent(each.served_share)] if number == 0 else ["", ""]
        size, dummies = format_size(lane.used), format_size(lane.dummy_bytes)
        yield [*first, lane.name, str(lane.experts), size, dummies]


profile_app = CommandGroup("Manage usage profiles of routed experts.")

BaseName = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of a base.", autocompletion=complete_bases)
]
ProfileFormat = Literal["activity", "prompts"]
_MAX_LANE_NAME = 20
"""Most characters in the name of a lane."""


@profile_app.command()
def show(name: BaseName, as_json: JsonFlag = False) -> None:
    """Show the usage profile of a base, layer by layer.

    Example: expertctl base profile show Qwen/Qwen3-30B-A3B
    """
    base, routed = _find_routed_base(name)
    profile = _load_usage_profile(base, routed)
    emit(
        build_profile_document(base.name, routed, profile),
        format_profile(base.name, routed, profile),
        as_json=as_json,
    )


@profile_app.command()
def export(
    name: BaseName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    kind: Annotated[
        ProfileFormat,
        typer.Option(
            help="activity: counts in the format of llama.cpp's hot cache; prompts: in that of "
            "flash-moe, but of tokens."
        ),
    ] = "activity",
    as_json: JsonFlag = False,
) -> None:
    """Write the usage profile of a base to a file.

    --moe-profile and `base profile import` read it, also on another machine.

    Example: expertctl base profile export Qwen/Qwen3-30B-A3B habits.json
    """
    from expertctl.engine.moe.profile_codecs import write_activity, write_prompt_counts

    base, routed = _find_routed_base(name)
    profile = _load_usage_profile(base, routed)
    if profile is None:
        raise NotFoundError(
            f"there is no usage profile of {base.name}",
            hint=f"`expertctl run --base {base.name} PROMPT` records one with native kernels",
        )
    if kind == "activity":
        data = write_activity(profile)
    else:
        data = write_prompt_counts(profile, experts=routed.count, model=base.name)
    write_file(file, data + b"\n", mode=0o600)
    note("a profile reveals something about your prompts: share it as carefully as a history")
    document = {"base": base.name, "path": str(file), "kind": kind, "size": len(data) + 1}
    emit(document, f"wrote {file}", as_json=as_json)


@profile_app.command("import")
def import_(
    name: BaseName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, of either kind.")],
    as_json: JsonFlag = False,
) -> None:
    """Import a usage profile; learning continues from it.

    Example: expertctl base profile import Qwen/Qwen3-30B-A3B habits.json
    """
    from expertctl.engine.moe.profile_codecs import read_profile
    from expertctl.engine.moe.usage_profile import EMPTY_PROFILE, MAX_PROFILE_TOKENS, add_profiles
    from expertctl.engine.moe.usage_store import LearntUsage, update_learnt_usage

    base, routed = _find_routed_base(name)
    profile = read_profile(file, routed)
    taken = add_profiles(EMPTY_PROFILE, profile)
    if not taken.is_usable:
        raise IncompatibleError(
            f"{file} counts no expert often enough: profiles are scaled to at most "
            f"{MAX_PROFILE_TOKENS:,} tokens, and then all its counts are below one",
            hint="nothing was changed; --moe-profile uses the file as it is",
        )
    update_learnt_usage(
        _open_usage_file(base), routed, lambda learnt: LearntUsage(learnt.base, taken)
    )
    layers = len(profile.counts)
    document = {"base": base.name, "path": str(file), "layers": layers}
    emit(document, f"{base.name} starts with {file} from now on", as_json=as_json)


@profile_app.command()
def forget(name: BaseName, as_json: JsonFlag = False) -> None:
    """Delete the usage profile of a base.

    Example: expertctl base profile forget Qwen/Qwen3-30B-A3B
    """
    base = open_base_store().find(name)
    was_there = _open_usage_file(base).remove()
    text = f"deleted the usage profile of {base.name}" if was_there else "there was none"
    emit({"base": base.name, "forgotten": was_there}, text, as_json=as_json)


def plan(
    name: BaseName,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--memory-budget",
            metavar="SIZE",
            help="Plan for this much memory.",
            show_default="what a run would take",
        ),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE",
            help="Memory of a device for experts; up to three, in order of use.",
            show_default="ram, as large as all slots",
        ),
    ] = None,
    strategy: Annotated[
        Literal["warm", "hot-even", "even-split"],
        typer.Option(help="How several lanes share experts."),
    ] = "warm",
    dtype: DtypeOption = None,
    moe_profile: MoeProfile = None,
    moe_pin: MoePin = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how a base would fit in memory, and what it loses in int8 and int4.

    Example: expertctl base plan Qwen/Qwen3-30B-A3B --memory 16GB
    """
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.cpu.schemes import choose_scheme
        from expertctl.engine.memory.budget import find_budget_limit
        from expertctl.engine.moe.base_plan import plan_base, plan_dense_base
        from expertctl.engine.moe.expert_files import find_compact_bytes
        from expertctl.engine.moe.usage_store import ExpertUsageStore
        from expertctl.engine.moe.warmup import describe_unused_option
    from expertctl.package.base_tensors import read_storages
    from expertctl.package.model_config import read_model_config
    from expertctl.routing.base_dtype import choose_dtype
    from expertctl.store.quantised_cache import open_quantised_cache

    settings = load_settings()
    check_cpu_only(settings, "base plan")
    base = open_base_store().find(name)
    open_base_store().check(base)
    if base.foreign:
        raise IncompatibleError(f"only transformers runs {base.name}: its memory is not planned")
    routed = read_routed_config(base)
    warmup = WarmupFlags(moe_profile=moe_profile, moe_pin=moe_pin).resolve(settings, learn=None)
    engine = EngineFlags("cpu", memory, NumericsFlags(dtype)).resolve(settings)
    keeper = ExpertUsageStore(open_base_store(), warmup)
    config, width = read_model_config(base.path), choose_dtype(base, engine.dtype)
    copies = open_quantised_cache(open_base_store(), base)
    limit = find_budget_limit(engine.memory_budget, "cpu")
    if routed is None or not config.has_kernels:  # numpy keeps all experts of such a base in memory
        given = {
            "--lane": bool(lane),
            "--moe-profile": moe_profile is not None,
            "--moe-pin": moe_pin is not None,
            "--strategy": strategy != "warm",
        }
        unused = [name for name, value in given.items() if value]
        what = "routed experts" + (" that could stay on the disk" if routed else "")
        warn([describe_unused_option(base.name, name, what=what) for name in unused])
        dense = plan_dense_base(
            config,
            engine,
            base=base.name,
            limit=limit,
            copies=copies,
            storages=read_storages(base.path, config),
            dtypes=None if dtype is None else (dtype,),
        )
        if dtype is not None and dtype in dense.unavailable:
            raise IncompatibleError(dense.unavailable[dtype], hint="leave out --dtype")
        warn(f"{name} cannot run it: {why}" for name, why in dense.unavailable.items())
        emit(dense.to_json(), format_dense_plan(dense), as_json=as_json)
        return
    found = plan_base(
        config,
        width,
        base=base.name,
        limit=limit,
        start=keeper.plan_warmup(base, routed),
        lanes=_parse_lanes(lane or ()),
        compact=find_compact_bytes(copies, config, choose_scheme(config, width)),
        copies=copies,
        strategy=strategy,
    )
    warn((*keeper.take_notes(), *(copies.take_notes() if copies else ())))
    emit(found.to_json(), format_routed_plan(found), as_json=as_json)


def open_base_store() -> BaseStore:
    """Return the registered bases of this home."""
    return BaseStore(load_settings().home.bases)


def _open_usage_file(base: StoredBase) -> UsageProfileFile:
    return UsageProfileFile(open_base_store(), base)


def _find_routed_base(name: str) -> "tuple[StoredBase, ExpertsConfig]":
    """Return a base and the configuration of its routed experts.

    Raises:
        NotFoundError: when there is no such base.
        IncompatibleError: when the base has no routed experts.
    """
    from expertctl.package.model_config import read_model_config

    base = open_base_store().find(name)
    routed = None if base.foreign else read_model_config(base.path).experts
    if routed is None:
        raise IncompatibleError(
            f"{base.name} has no routed experts", hint="`expertctl base list` shows the bases"
        )
    return base, routed


def read_routed_config(base: StoredBase) -> "ExpertsConfig | None":
    """Return the routed experts of a native base; None if it has none, or cannot be read."""
    from expertctl.package.model_config import read_model_config

    try:
        return None if base.foreign else read_model_config(base.path).experts
    except ExpertError:  # `base list` shows that its files changed, and using it shows the error
        return None


def _load_usage_profile(base: StoredBase, routed: "ExpertsConfig") -> "UsageProfile | None":
    """Return the learnt usage of a base; None if there is none."""
    from expertctl.engine.moe.usage_store import load_learnt_profile

    return load_learnt_profile(_open_usage_file(base), routed)


def _parse_lanes(texts: Sequence[str]) -> dict[str, int]:
    lanes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.partition("=")
        if not name.isprintable() or not name or not size:
            raise UsageError(
                f"--lane {text[:40]!r}: not a name and a size", hint="write --lane gpu=6GB"
            )
        if len(name) > _MAX_LANE_NAME:
            raise UsageError(
                f"--lane {name[:_MAX_LANE_NAME]}…: a name of more than {_MAX_LANE_NAME} characters",
                hint="name a memory gpu, ram or the like",
            )
        if name in lanes:
            raise UsageError(
                f"--lane {name} is given twice", hint="name each memory once, such as gpu, ram"
            )
        lanes[name] = parse_size(size)
    return lanes
