"""``expertctl base profile`` and ``base plan``: what is known of a base's routed experts.

A profile records which routed experts the answers on a base asked for: it is learnt here or read
from a file, and kept only on this machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.help import CommandGroup
from expertctl.cli.named_file import write_file
from expertctl.cli.opening import importing_engine
from expertctl.cli.output import JsonFlag, emit, note, warn
from expertctl.cli.run_options import (
    Dtype,
    MoePin,
    MoeProfile,
    budget_of,
    check_processor,
    numerics_of,
    start_of,
)
from expertctl.errors import IncompatibleError, NotFoundError, UsageError
from expertctl.settings import load_settings, parse_size
from expertctl.store.base_habits import HabitsFile
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

if TYPE_CHECKING:
    from expertctl.engine.moe.guide import Guide
    from expertctl.package.experts_config import ExpertsConfig

profile = CommandGroup("Manage usage profiles of routed experts.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a base.")]
Kind = Literal["activity", "prompts"]
_LONGEST = 20
"""Characters of the name of a lane."""


@profile.command()
def show(name: Name, as_json: JsonFlag = False) -> None:
    """Show how much was learnt of a base, and of which experts, layer by layer.

    Example: expertctl base profile show Qwen/Qwen3-30B-A3B
    """
    from expertctl.cli.base_experts_view import profile_document, profile_text

    base, routed = _routed(name)
    guide = _learnt(base, routed)
    emit(
        profile_document(base.name, routed, guide),
        profile_text(base.name, routed, guide),
        as_json=as_json,
    )


@profile.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="activity: counts as llama.cpp's hot cache has them; prompts: as flash-moe has "
            "them, of tokens."
        ),
    ] = "activity",
    as_json: JsonFlag = False,
) -> None:
    """Write what was learnt of a base into a file.

    It is what --moe-profile and `base profile import` read, on another machine, too.

    Example: expertctl base profile export Qwen/Qwen3-30B-A3B habits.json
    """
    from expertctl.engine.moe.activity_document import write_activity
    from expertctl.engine.moe.guide import usage_of
    from expertctl.engine.moe.usage_profile import write_profile

    base, routed = _routed(name)
    guide = _learnt(base, routed)
    if guide is None:
        raise NotFoundError(
            f"nothing was learnt of {base.name}",
            hint=f"`expertctl run --base {base.name} PROMPT` learns where kernels compute",
        )
    if kind == "activity":
        data = write_activity(guide.activity)
    else:
        data = write_profile(usage_of(guide.activity, experts=routed.count, model=base.name))
    write_file(file, data + b"\n", mode=0o600)
    note("it tells something of what was written about: share it only as you would a history")
    document = {"base": base.name, "path": str(file), "kind": kind, "size": len(data) + 1}
    emit(document, f"wrote {file}", as_json=as_json)


@profile.command("import")
def import_(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, of either kind.")],
    as_json: JsonFlag = False,
) -> None:
    """Take a file for what was learnt of a base; more is added to it.

    Example: expertctl base profile import Qwen/Qwen3-30B-A3B habits.json
    """
    from expertctl.engine.moe.activity_sum import FADED_AT, NOTHING, added
    from expertctl.engine.moe.guide import read_guide
    from expertctl.engine.moe.habit_keeper import learn
    from expertctl.engine.moe.habits import Habits

    base, routed = _routed(name)
    guide = read_guide(file, routed)
    taken = added(NOTHING, guide.activity)
    if not any(layer.hits for layer in taken.layers):
        raise IncompatibleError(
            f"{file} counts no expert often enough: what is learnt is kept for at most "
            f"{FADED_AT:,} tokens, and all its counts are below one then",
            hint="nothing was changed; --moe-profile uses the file as it is",
        )
    learn(_file(base), routed, lambda habits: Habits(habits.base, taken))
    layers = len(guide.usage.layers)
    document = {"base": base.name, "path": str(file), "layers": layers}
    emit(document, f"{base.name} begins with {file} from now on", as_json=as_json)


@profile.command()
def forget(name: Name, as_json: JsonFlag = False) -> None:
    """Forget what was learnt of a base.

    Example: expertctl base profile forget Qwen/Qwen3-30B-A3B
    """
    base = _bases().find(name)
    was_there = _file(base).remove()
    text = f"forgot what was learnt of {base.name}" if was_there else "there was nothing"
    emit({"base": base.name, "forgotten": was_there}, text, as_json=as_json)


def plan(
    name: Name,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--memory-budget",
            metavar="SIZE",
            help="For so much memory.",
            show_default="what a run would take",
        ),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE",
            help="Plan this memory of a device for experts; up to three, in their order.",
            show_default="ram, as large as all slots",
        ),
    ] = None,
    strategy: Annotated[
        Literal["warm", "hot-even", "even-split"],
        typer.Option(help="How several lanes share experts."),
    ] = "warm",
    dtype: Dtype = None,
    moe_profile: MoeProfile = None,
    moe_pin: MoePin = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which routed experts a memory would hold.

    Example: expertctl base plan Qwen/Qwen3-30B-A3B --memory 16GB
    """
    with importing_engine(as_json=as_json):
        from expertctl.engine.memory import budget_limit
        from expertctl.engine.moe.expert_copies import compact_bytes
        from expertctl.engine.moe.habit_keeper import HabitKeeper
        from expertctl.engine.packed_backend import SCHEMES
        from expertctl.engine.routed_plan import routed_plan
    from expertctl.cli.base_experts_view import plan_text
    from expertctl.package.model_config import read_config
    from expertctl.routing.numerics import dtype_of
    from expertctl.store.quantised_copies import copies_of

    settings = load_settings()
    check_processor(settings, "base plan")
    base, routed = _routed(name)
    _bases().check(base)
    held = numerics_of(settings, dtype=dtype, adapter_dtype=None, deterministic=None)
    wishes = start_of(
        settings, profile=moe_profile, pin=moe_pin, warmup=None, exchange=0.0, learn=None
    )
    keeper = HabitKeeper(_bases(), wishes)
    config, width = read_config(base.path), dtype_of(base, held.dtype)
    copies = copies_of(_bases(), base)
    found = routed_plan(
        config,
        width,
        base=base.name,
        limit=budget_limit(budget_of(memory, settings), "cpu"),
        start=keeper.start(base, routed),
        lanes=_lanes(lane or ()),
        compact=compact_bytes(copies, config, SCHEMES[width]),
        strategy=strategy,
    )
    warn((*keeper.take_notes(), *(copies.take_notes() if copies else ())))
    emit(found.to_json(), plan_text(found), as_json=as_json)


def _bases() -> BaseStore:
    return BaseStore(load_settings().home.bases)


def _file(base: StoredBase) -> HabitsFile:
    return HabitsFile(_bases(), base)


def _routed(name: str) -> "tuple[StoredBase, ExpertsConfig]":
    """Return a base and the configuration of its routed experts.

    Raises:
        NotFoundError: when there is no such base.
        IncompatibleError: when the base has no routed experts.
    """
    from expertctl.package.model_config import read_config

    base = _bases().find(name)
    routed = None if base.foreign else read_config(base.path).experts
    if routed is None:
        raise IncompatibleError(
            f"{base.name} has no routed experts", hint="`expertctl base list` shows the bases"
        )
    return base, routed


def _learnt(base: StoredBase, routed: "ExpertsConfig") -> "Guide | None":
    """Return what was learnt of a base; None if nothing was."""
    from expertctl.engine.moe.habit_keeper import learnt_guide

    return learnt_guide(_file(base), routed)


def _lanes(texts: Sequence[str]) -> dict[str, int]:
    lanes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.partition("=")
        if not name.isprintable() or not name or not size:
            raise UsageError(
                f"--lane {text[:40]!r}: no name and size of a memory", hint="write --lane gpu=6GB"
            )
        if len(name) > _LONGEST:
            raise UsageError(
                f"--lane {name[:_LONGEST]}…: a name of more than {_LONGEST} characters",
                hint="name a memory gpu, ram or the like",
            )
        if name in lanes:
            raise UsageError(
                f"--lane {name} is given twice", hint="name each memory once, such as gpu, ram"
            )
        lanes[name] = parse_size(size)
    return lanes
