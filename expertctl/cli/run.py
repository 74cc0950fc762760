"""``expertctl route`` and ``run``: from a prompt to a plan, and to its text.

Torch is imported by `run` alone, inside the function: `route` only reads what is installed.
"""

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.output import JsonFlag, emit, note, print_json, progress, warn, write_piece
from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError, UsageError
from expertctl.settings import DEVICES, Settings, load_settings, parse_size

if TYPE_CHECKING:
    from expertctl.engine.request import RunRequest
    from expertctl.engine.run_result import RunResult
    from expertctl.routing.planner import Planner

_MAX_TEXT_BYTES = 4 * 500_001
"""More than the longest prompt can have in UTF-8."""

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads stdin.")]
Expert = Annotated[
    list[str] | None,
    typer.Option(metavar="REF[:WEIGHT]", help="Use this expert, in this order; repeatable."),
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="REF", help="Never use this one; repeatable.")
]
MaxExperts = Annotated[int, typer.Option(help="How many experts a plan may have, 1 to 10.")]
NoExperts = Annotated[bool, typer.Option("--no-experts", help="Let the base answer alone.")]
Base = Annotated[
    str | None, typer.Option(metavar="REF", help="The base; else the one that suits the experts.")
]
Temperature = Annotated[float | None, typer.Option(help="0 to 2; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Above 0, up to 1.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 switches it off.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="0 switches it off.")]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="1 to 2.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="1 to 200000.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Dtype = Annotated[Literal["float32", "bf16"], typer.Option(help="How base weights are held.")]
AdapterDtype = Annotated[
    Literal["published"], typer.Option("--adapter-dtype", help="How adapters are held.")
]
Mismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Accept experts made for another base.")
]
MemoryBudget = Annotated[
    str | None, typer.Option("--memory-budget", metavar="SIZE", help="Such as 512MiB.")
]


def route(
    prompt: Prompt,
    expert: Expert = None,
    exclude: Exclude = None,
    max_experts: MaxExperts = 10,
    no_experts: NoExperts = False,
    base: Base = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    greedy: Greedy = False,
    dtype: Dtype = "float32",
    adapter_dtype: AdapterDtype = "published",
    memory_budget: MemoryBudget = None,
    allow_base_mismatch: Mismatch = False,
    as_json: JsonFlag = False,
) -> None:
    """Show which experts would answer a prompt, and why. Nothing is loaded.

    Example: expertctl route "Sort these numbers: 41, 17, 23"
    """
    from expertctl.cli.run_view import routing_text
    from expertctl.routing.presets import SamplingWishes
    from expertctl.routing.request import RouteRequest, check_request, parse_forced, parse_target

    settings = load_settings()
    request = RouteRequest(
        prompt=_text(prompt, "the prompt"),
        force=tuple(parse_forced(text) for text in expert or ()),
        exclude=tuple(parse_target(text) for text in exclude or ()),
        max_experts=max_experts,
        base_alone=no_experts,
        seed=seed,
        wishes=SamplingWishes(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            stop=tuple(stop) if stop else None,
            greedy=greedy,
        ),
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        memory_budget=_budget(memory_budget, settings),
        allow_base_mismatch=allow_base_mismatch,
    )
    check_request(request)
    planned = _planner(settings, as_json=as_json).plan(request, base=base)
    warn(planned.warnings)
    emit(planned.result.to_json(), routing_text(planned.result), as_json=as_json)


def run(
    prompt: Prompt,
    expert: Expert = None,
    exclude: Exclude = None,
    max_experts: MaxExperts = 10,
    no_experts: NoExperts = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer as a saved plan says.")
    ] = None,
    base: Base = None,
    body: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text that follows the prompt; - is stdin.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With {prompt} and {body}, once at most.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    greedy: Greedy = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut the end of a prompt that is too long.")
    ] = False,
    device: Annotated[
        Literal["cpu"] | None, typer.Option(help="Where to compute.", show_default="cpu")
    ] = None,
    memory_budget: MemoryBudget = None,
    on_budget: Annotated[
        Literal["refuse"], typer.Option("--on-budget", help="What to do when it does not fit.")
    ] = "refuse",
    dtype: Dtype = "float32",
    adapter_dtype: AdapterDtype = "published",
    verify_base: Annotated[
        bool, typer.Option("--verify-base", help="Hash every byte of the base again.")
    ] = False,
    allow_base_mismatch: Mismatch = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")
    ] = True,
    as_json: JsonFlag = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show all figures below.")] = False,
) -> None:
    """Answer a prompt with the experts that suit it, or named ones.

    Example: expertctl run "Sort these numbers: 41, 17, 23" --seed 1
    """
    from expertctl.engine.message import UserMessage
    from expertctl.engine.request import RunRequest, parse_expert
    from expertctl.routing.plan_file import read_plan
    from expertctl.routing.presets import SamplingWishes
    from expertctl.routing.request import RouteRequest, check_request, parse_target

    del on_budget  # there is one way so far
    settings = load_settings()
    _check_device(device or settings.device)
    message = UserMessage(
        prompt=_text(prompt, "the prompt"), body=_body(body, prompt), template=template
    )
    message.text()
    request = RunRequest(
        message=message,
        experts=tuple(parse_expert(text) for text in expert or ()),
        route=RouteRequest(
            prompt=message.prompt,
            exclude=tuple(parse_target(text) for text in exclude or ()),
            max_experts=max_experts,
            base_alone=no_experts,
            seed=seed,
            wishes=SamplingWishes(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                max_tokens=max_tokens,
                stop=tuple(stop) if stop else None,
                greedy=greedy,
            ),
            dtype=dtype,
            adapter_dtype=adapter_dtype,
            memory_budget=_budget(memory_budget, settings),
            allow_base_mismatch=allow_base_mismatch,
        ),
        base=base,
        saved=read_plan(plan) if plan else None,
        truncate=truncate,
        verify_base=verify_base,
    )
    check_request(request.route)
    result = _run(request, settings, stream=stream and not as_json, as_json=as_json)
    _show(result, stream=stream, as_json=as_json, stats=stats)


def _run(request: "RunRequest", settings: Settings, *, stream: bool, as_json: bool) -> "RunResult":
    """Answer, with a progress bar until the first piece of text; print pieces when wanted."""
    try:
        from expertctl.engine.runtime import Engine
    except ModuleNotFoundError as error:
        raise _without_engine(error) from error
    planner = _planner(settings, as_json=as_json)
    with progress("loading", None, as_json=as_json) as report:
        engine = Engine(planner, budget=request.route.memory_budget, progress=report)
        answer = _Answer(engine.run(request))
        answer.advance()
    while answer.result is None:
        if stream:
            write_piece(answer.piece)
        answer.advance()
    return answer.result


class _Answer:
    """The pieces of a text, one at a time, and then the result."""

    def __init__(self, pieces: "Generator[str, None, RunResult]") -> None:
        self.piece = ""
        self.result: RunResult | None = None
        self._pieces = pieces

    def advance(self) -> None:
        """Get the next piece, or the result."""
        try:
            self.piece = next(self._pieces)
        except StopIteration as end:
            self.result = end.value


def _show(result: "RunResult", *, stream: bool, as_json: bool, stats: bool) -> None:
    from expertctl.cli.run_view import footer, statistics

    text = result.generated.text
    if as_json:
        warn(result.warnings)
        print_json(result.to_json())
        return
    if not stream:
        write_piece(text)
    if text and not text.endswith("\n"):
        write_piece("\n")
    shown_below = set(result.planned.result.notes)
    warn(warning for warning in result.warnings if warning not in shown_below)
    note(statistics(result) if stats else footer(result))


def _planner(settings: Settings, *, as_json: bool) -> "Planner":
    """Open the home; a new one gets the starter pack first, through the ordinary install."""
    from expertctl.install.starter import install_starter, is_wanted
    from expertctl.routing.planner import Planner

    planner = Planner.open(settings)
    if is_wanted(planner.store, planner.bases):
        with progress("installing the starter pack", None, as_json=as_json) as report:
            installed = install_starter(
                store=planner.store,
                bases=planner.bases,
                trust=planner.trust,
                catalogue=planner.catalogue,
                index=planner.index,
                progress=report,
            )
        warn(warning for item in installed for warning in item.warnings)
        names = ", ".join(item.expert.ref for item in installed)
        note(f"installed the starter pack: {names}")
    return planner


def _without_engine(error: ModuleNotFoundError) -> ExpertError:
    if error.name not in {"torch", "jinja2"}:
        raise error
    return NotFoundError(
        f"running a model needs {error.name}, which is not installed",
        hint="pip install 'expertctl[engine]'",
    )


def _body(source: str | None, prompt: str) -> str | None:
    if source == prompt == "-":
        raise UsageError("prompt and body cannot both come from stdin")
    if source is None or source == "-":
        return None if source is None else _text("-", "the body")
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return _decoded(stream.read(_MAX_TEXT_BYTES), str(path))
    except OSError as error:
        raise NotFoundError(f"body {path}: {error.strerror or error}") from error


def _text(argument: str, what: str) -> str:
    """Return the argument, or for ``-`` what stdin holds, without its last line end."""
    if argument != "-":
        return argument
    text = _decoded(sys.stdin.buffer.read(_MAX_TEXT_BYTES), f"{what} on stdin")
    return text.removesuffix("\n").removesuffix("\r")


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPackageError(
            what, [f"not UTF-8 at byte {error.start}"], hint="convert it, e.g. with iconv"
        ) from error


def _budget(text: str | None, settings: Settings) -> int | None:
    return parse_size(text) if text else settings.memory_budget


def _check_device(device: str | None) -> None:
    if device is not None and device not in DEVICES:
        hint = "`expertctl config unset device`, or set EXPERT_DEVICE=cpu"
        raise UsageError(f"device {device!r} is not supported", hint=hint)
