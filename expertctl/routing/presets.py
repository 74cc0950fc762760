"""Request limits, defaults and task presets, and who decides each generation setting.

The first source that gives a setting wins: the user, then the experts' ``decoding`` in the order of
the plan, then the ``generation_config.json`` of the base, then the preset of the task, which is
complete. The task is that of the first expert that names a preset, else what the prompt looks like.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from expertctl.errors import ContextLengthError, UsageError
from expertctl.routing.plan import SamplingParams
from expertctl.schema.manifest import Decoding, Manifest

MAX_PROMPT_CHARACTERS = 500_000
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 200
LIMITS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, 200_000),
    "max_experts": (1, 10),
    "priority": (0, 9),
    "seed": (0, 2**53 - 1),
    "weight": (-10.0, 10.0),
}
"""Setting → smallest and largest value; ``top_p`` is above 0."""

_ABOVE = frozenset({"top_p"})
DEFAULT_MAX_EXPERTS = 10
PRESETS: Mapping[str, SamplingParams] = {
    "json_parsing": SamplingParams(temperature=0.2, max_tokens=2048),
    "creative_writing": SamplingParams(temperature=0.8, max_tokens=4096),
    "code_generation": SamplingParams(temperature=0.4, max_tokens=8192),
    "default": SamplingParams(temperature=0.6, max_tokens=2048),
}
NOTHING: Mapping[str, float] = {}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWishes:
    """The settings that a user gave; ``None`` leaves one to the experts and the preset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    greedy: bool = False


NO_WISHES = SamplingWishes()


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that is blank or too long.

    Raises:
        ContextLengthError: when it is too long.
        UsageError: when it is blank.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint='expertctl run "Sort these numbers: 3, 1, 2"')
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            size=len(prompt),
            most=MAX_PROMPT_CHARACTERS,
            unit="characters",
            hint="shorten it, or ask in several parts",
        )


def check_limit(name: str, value: float | None) -> None:
    """Refuse a value outside ``LIMITS``; ``None`` is no choice and fits.

    Raises:
        UsageError: with the range.
    """
    if value is None or is_within(name, value):
        return
    low, high = LIMITS[name]
    bounds = f"{low:.16g} to {high:.16g}"
    above = f"must be above {low:.16g}, up to {high:.16g}"
    said = above if name in _ABOVE else f"is outside {bounds}"
    raise UsageError(
        f"{name} {value} {said}",
        hint="give a value between these, or leave it out",
    )


def is_within(name: str, value: float) -> bool:
    """Tell whether a value is within ``LIMITS``."""
    low, high = LIMITS[name]
    return low < value <= high if name in _ABOVE else low <= value <= high


def check_wishes(wishes: SamplingWishes) -> None:
    """Refuse settings outside the limits, and a temperature beside greedy decoding.

    Raises:
        UsageError: naming the setting.
    """
    given = _given(wishes)
    for name, value in given.items():
        if name != "stop":
            check_limit(name, value)
    stops = wishes.stop or ()
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_CHARACTERS for s in stops):
        raise UsageError(
            f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARACTERS} characters",
            hint="give fewer, or shorter ones",
        )
    if wishes.greedy and wishes.temperature:
        raise UsageError(
            f"temperature {wishes.temperature:g} has no effect when decoding is greedy",
            hint="leave out the one or the other",
        )


def resolve(
    wishes: SamplingWishes,
    experts: Sequence[Manifest],
    *,
    prompt_task: str,
    base: Mapping[str, float] = NOTHING,
) -> SamplingParams:
    """Return the complete settings of a plan; see the module for who wins.

    ``base`` holds what the base comes with. Greedy decoding keeps the penalties that the user gave;
    those of experts and bases are meant for sampling.

    Raises:
        UsageError: for a wish outside the limits.
    """
    check_wishes(wishes)
    preset: Any = {**asdict(PRESETS[_preset_name(experts, prompt_task)]), **base}
    params = SamplingParams(**preset)
    for manifest in reversed(experts):
        params = replace(params, **_recommended(manifest.decoding))
    given = _given(wishes)
    params = replace(params, **given)
    if not (wishes.greedy or params.is_greedy):
        return params
    penalties = {name: given[name] for name in _PENALTIES if name in given}
    return replace(params.greedy(), **penalties)


def completed(wishes: SamplingWishes, saved: SamplingParams) -> SamplingWishes:
    """Return complete wishes: what they leave open is taken from a saved plan."""
    params = saved.greedy() if wishes.greedy or wishes.temperature == 0.0 else saved
    kept = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return replace(wishes, **{**kept, **_given(wishes)})


def unapplied(decoding: Decoding) -> list[str]:
    """Name the recommended settings that no run applies."""
    return [] if decoding.grammar is None else ["grammar"]


def _preset_name(experts: Iterable[Manifest], prompt_task: str) -> str:
    named = (m.routing.task for m in experts if m.routing.task in PRESETS)
    return next(named, prompt_task if prompt_task in PRESETS else "default")


def _recommended(decoding: Decoding) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    values = {name: getattr(decoding, name) for name in names}
    stops = {"stop": decoding.stop} if decoding.stop else {}
    return {**{n: v for n, v in values.items() if v is not None}, **stops}


def _given(wishes: SamplingWishes) -> dict[str, Any]:
    values = {name: getattr(wishes, name) for name in SamplingParams.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}
