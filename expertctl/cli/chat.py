"""``expertctl chat``: a conversation on a terminal, or with the lines of a script.

The engine is imported only if no running server answers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.chat_session import ChatSession, LocalChat
from expertctl.cli.engine import (
    LoadingProgress,
    guard_engine_import,
    open_engine,
    open_planner,
    resolve_base,
)
from expertctl.cli.help import expand_flags
from expertctl.cli.history import (
    find_last_base,
    read_last_conversation,
    read_last_document,
)
from expertctl.cli.output import JsonFlag
from expertctl.cli.prompt_input import (
    PromptInput,
    make_line_reader,
    read_body,
    read_input,
)
from expertctl.cli.run_options import (
    Base,
    Continue,
    EngineFlags,
    ExpertFlags,
    Local,
    MoeLearn,
    OnBudget,
    SamplingFlags,
    Stats,
    System,
    Template,
    VerifyBase,
    WarmupFlags,
    build_route_request,
)
from expertctl.errors import UsageError
from expertctl.settings import Settings, load_settings
from expertctl.user_request import UserMessage

if TYPE_CHECKING:
    from expertctl.cli.remote import RemoteEngine
    from expertctl.cli.remote_conversation import RemoteConversation
    from expertctl.engine.conversation import Conversation
    from expertctl.engine.request import RunRequest, SavedConversation


@expand_flags
def chat(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The first message, then piped text. Without it, each line of stdin is one.",
            show_default=False,
        ),
    ] = None,
    *,
    experts: ExpertFlags,
    base: Base = None,
    body: Annotated[
        str | None, typer.Option(metavar="FILE", help="File to append to the first message.")
    ] = None,
    template: Template = None,
    system: System = None,
    sampling: SamplingFlags,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Leave out the oldest turns when a conversation does not fit."
        ),
    ] = False,
    resume: Continue = False,
    flags: EngineFlags,
    on_budget: OnBudget = "refuse",
    warmup: WarmupFlags,
    moe_learn: MoeLearn = None,
    verify_base: VerifyBase = False,
    local: Local = False,
    as_json: JsonFlag = False,
    stats: Stats = False,
) -> None:
    r"""Chat with experts; /? lists the commands.

    Example: printf 'Put 41, 17, 23 in ascending order\nAnd 9, 8, 7\n' | expertctl chat
    """
    settings = load_settings()
    only_here = {
        "on_budget": on_budget != "refuse",
        "moe_learn": moe_learn is not None,
        "verify_base": verify_base,
    }
    server = None
    if not local and settings.may_have_server:
        from expertctl.cli.remote import choose_server
        from expertctl.cli.remote_question import list_local_options

        only_local = list_local_options(experts, sampling, flags, warmup, only_here)
        server = choose_server(settings, only_local)
    config = None if server else flags.resolve(settings, warmup=warmup, learn=moe_learn)
    first = _read_first_message(prompt, body)
    if experts.expert and experts.no_experts:
        raise UsageError(
            "--expert and --no-experts contradict each other",
            hint="leave out --expert or --no-experts",
        )

    def open_local() -> LocalChat:
        from expertctl.engine.request import RunRequest
        from expertctl.routing.request import check_request

        message = UserMessage(prompt="?", body=first.body, template=template)
        message.text()
        engine = config or flags.resolve(settings, warmup=warmup, learn=moe_learn)
        earlier = read_last_conversation(settings) if resume else None
        last = None if experts.expert or earlier is None else find_last_base(earlier, settings)
        pattern = RunRequest(
            message=message,
            route=build_route_request(message.prompt, engine, experts=experts, sampling=sampling),
            base=resolve_base(base, settings, as_json=as_json) or last,
            truncate=truncate,
            verify_base=verify_base,
            on_budget=on_budget,
        )
        check_request(pattern.route)
        return _open_local_chat(pattern, settings, as_json=as_json)

    def open_remote(server: "RemoteEngine") -> "RemoteConversation":
        from expertctl.cli.remote_conversation import RemoteConversation
        from expertctl.cli.remote_question import build_options, build_question

        options = build_options(experts, sampling, base=base, truncate=truncate)
        texts, is_own = PromptInput("?", first.body), not server.is_named
        earlier = read_last_document(settings) if resume else b"{}"
        pattern = build_question(texts, options, template=template, is_own=is_own, earlier=earlier)
        conversation = RemoteConversation(server, pattern, sampling)
        conversation.restore_document(earlier)
        return conversation

    session = ChatSession(settings, open_local, as_json=as_json, stats=stats)
    if server is not None:
        session.use_server(open_remote(server), system=system, named=experts.expert or ())
    if server is None or session.is_local:
        earlier = read_last_conversation(settings) if resume else None
        _begin(session.start_here(), earlier, system=system, named=experts.expert or ())
    raise typer.Exit(session.run(make_line_reader(as_json=as_json), first=first.prompt))


def _begin(
    conversation: "Conversation",
    earlier: "SavedConversation | None",
    *,
    system: str | None,
    named: Sequence[str],
) -> None:
    """Continue an earlier conversation, with another system message and named experts, if given."""
    if earlier is not None:
        conversation.restore(earlier)
    if system is not None:
        conversation.system = system if system.strip() else ""
    if named:
        conversation.use_named(named)


def _read_first_message(words: list[str] | None, body: str | None) -> PromptInput:
    """Return the first message and the body; the message is empty if it comes from stdin."""
    if words:
        first = read_input(words, body)
        if not first.prompt.strip():
            raise UsageError("the first message is empty", hint="leave it out to read lines")
        return first
    if body == "-":
        raise UsageError(
            "a body cannot come from stdin: the messages come from there",
            hint="write it to a file: --body FILE",
        )
    return PromptInput("", read_body(body))


def _open_local_chat(pattern: "RunRequest", settings: Settings, *, as_json: bool) -> LocalChat:
    planner, loading = open_planner(settings, as_json=as_json), LoadingProgress()
    with guard_engine_import(as_json=as_json):
        engine = open_engine(planner, pattern.route.config, progress=loading)
        from expertctl.engine.conversation import Conversation

    return LocalChat(Conversation(engine, pattern), planner, loading, engine.close)
