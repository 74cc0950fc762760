"""`ChatSession`: the turns and commands of one chat, with an engine of this process or a server.

Answers go to stdout, everything else to stderr. An error in a turn is printed and the chat goes
on; a script gets the exit code of the first error. ``--json`` prints all turns as one document at
the end.
"""

import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expertctl.cli.chat_settings import SETTINGS, change_sampling, format_sampling
from expertctl.cli.engine import (
    LoadingCancelledError,
    LoadingProgress,
    open_planner,
    save_plan,
)
from expertctl.cli.history import (
    complete_path,
    encode_conversation,
    keep_conversation,
    open_line_editor,
    read_conversation,
)
from expertctl.cli.output import (
    debug,
    fail,
    format_count,
    note,
    open_answer_stream,
    print_json,
    print_message,
    quote,
    terminal_width,
    warn,
    write_file,
)
from expertctl.cli.process import OK, CancellationFlag, TerminatedError, get_exit_code
from expertctl.cli.progress import show_loading
from expertctl.cli.prompt_input import (
    ChatInput,
    ReadLine,
    is_terminal,
    read_chat_input,
)
from expertctl.cli.suggestions import add_chat_hint
from expertctl.errors import (
    BaseMismatchError,
    ExpertError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from expertctl.reference import DEMO_BASE
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.cli.remote_conversation import RemoteConversation, RemoteTurn
    from expertctl.client.result import RunAnswer
    from expertctl.engine.conversation import Conversation, Turn
    from expertctl.routing.planner import Planner
    from expertctl.store.catalogue import Catalogue

    _AnyTurn = Turn | RemoteTurn
    _Send = Callable[..., Generator[str, None, _AnyTurn]]

EXIT_COMMANDS = ("/bye", "/exit", "/quit")
EXIT_HINT = "press Ctrl-C again to leave, or /?"
_OPENING = "/? lists the commands, /bye leaves"


@dataclass(frozen=True, slots=True)
class LocalChat:
    """A conversation with an engine of this process."""

    conversation: "Conversation"
    planner: "Planner"
    loading: LoadingProgress
    close: Callable[[], None]
    """Called at the end of the chat, to save the usage profile."""


class ChatSession:
    """One chat: its conversation, the turns for ``--json``, the exit code of its first error.

    The conversation is with an engine of this process, opened by `start_here`, or with a server.
    """

    def __init__(
        self,
        settings: Settings,
        open_local: Callable[[], LocalChat],
        *,
        as_json: bool,
        stats: bool,
    ) -> None:
        """Start without a conversation; ``open_local`` is called when it is needed."""
        self._open_local = open_local
        self._local: LocalChat | None = None
        self._remote: RemoteConversation | None = None
        self._settings = settings
        self._as_json, self._stats = as_json, stats
        self._interactive = is_terminal()
        self._exit_code = OK
        self._documents: list[dict[str, object]] = []
        self._warned: set[str] = set()
        self._commands: dict[str, Callable[[list[str]], None]] = {
            **dict.fromkeys(("/?", "/help"), self._show_help),
            "/experts": self._select_experts,
            "/system": self._set_system,
            "/set": self._change_setting,
            "/retry": self._retry,
            "/plan": self._show_plan,
            "/feedback": self._record_feedback,
            "/save": self._save,
            "/load": self._load,
            **dict.fromkeys(("/reset", "/clear"), self._reset_conversation),
            **dict.fromkeys(
                EXIT_COMMANDS, _check_no_arguments
            ),  # without arguments they end the chat earlier
        }

    @property
    def is_local(self) -> bool:
        """Whether an engine of this process answers."""
        return self._remote is None

    @property
    def conversation(self) -> "Conversation | RemoteConversation":
        """The conversation, with the engine of this process or with a server."""
        return self._remote or self.start_here()

    def start_here(self) -> "Conversation":
        """Open the engine of this process, if it is not open yet, and return its conversation."""
        self._local = self._local or self._open_local()
        return self._local.conversation

    def use_server(
        self, conversation: "RemoteConversation", *, system: str | None, named: Sequence[str]
    ) -> None:
        """Let a server answer, unless it is to be left to this process.

        Raises:
            ExpertError: when the server that the user named refuses the named experts.
        """
        if system is not None:
            conversation.system = system if system.strip() else ""
        try:
            if named:
                conversation.use_named(named)
        except (BaseMismatchError, UnreachableError) as error:
            if conversation.is_named:
                raise
            debug(f"the server is not used: {error.message}")
        else:
            self._remote = conversation

    def _leave_server(self, conversation: "RemoteConversation") -> None:
        """Go on in this process, unless that fails: then the server is asked again later."""
        conversation.move_to(self.start_here())
        self._remote = None

    @property
    def _last_turn(self) -> "_AnyTurn | None":
        """The last turn; a server that was left since may have answered it."""
        turns = self.conversation.turns
        return cast("_AnyTurn", turns[-1]) if turns else None

    @property
    def _planner(self) -> "Planner":
        self.start_here()
        assert self._local is not None, "start_here opens it"
        return self._local.planner

    def run(self, read_line: ReadLine, *, first: str = "") -> int:
        """Answer until the end of the input, and return the exit code.

        If ``first`` is given and stdin is not a terminal, nothing else is read.
        """
        if self._interactive:
            note(self._describe_start(), dim=True)
        lines = self._settings.home.chat_history if self._settings.history else None
        try:
            if first:
                self._handle_input(ChatInput(first))
            if self._interactive:
                with open_line_editor(lines, self._complete, read_line) as read_line:
                    self._answer_lines(read_line)
            elif not first:
                self._answer_lines(read_line)
        except KeyboardInterrupt:  # other errors print a document of their own
            self._print_turns()
            raise
        self._print_turns()
        with suppress(UsageError):  # an interrupted answer may still be resolved
            if self._local is not None:
                self._local.close()
        return OK if self._interactive else self._exit_code

    def _describe_start(self) -> str:
        """Return the base, the number of its experts, and how to get help."""
        from expertctl.cli.run_view import find_fitting_experts

        if self._remote is not None:
            return f"{self._remote.described}; {_OPENING}"
        with suppress(ExpertError):  # the first message reports it
            base, fitting, _ = find_fitting_experts(self.start_here(), self._planner)
            if base is not None:
                demo = " (a demo of two million weights)" if base.name == DEMO_BASE else ""
                experts = format_count(len(fitting), "expert")
                return f"{base.name}{demo}, {experts}; {_OPENING}"
        return _OPENING

    def _answer_lines(self, read_line: ReadLine) -> None:
        while (line := self._read_next(read_line)) is not None and not _is_exit(line):
            if line.text.strip():
                self._handle_input(line)

    def _print_turns(self) -> None:
        if self._as_json:
            print_json({"turns": self._documents})

    def _read_next(self, read_line: ReadLine) -> ChatInput | None:
        """Return the next input, None at the end; at a prompt, Ctrl-C twice ends the chat."""
        for hint in (EXIT_HINT, ""):
            try:
                return read_chat_input(read_line)
            except KeyboardInterrupt as key:
                if not self._interactive or isinstance(key, TerminatedError):
                    raise
                print_message(f"\n{hint}".rstrip())
            except ExpertError as error:
                self._report_error("", error)
                return None if not self._interactive else ChatInput("")
        return None

    def _handle_input(self, message: ChatInput) -> None:
        try:
            if message.is_command:
                self._run_command(message.text.split())
            else:
                self._answer(message.text)
        except ExpertError as error:
            self._report_error(message.text, error)

    def _report_error(self, text: str, error: ExpertError) -> None:
        is_open = self._remote is not None or self._local is not None  # an error opens no engine
        has_turns = is_open and bool(self.conversation.turns)
        error = add_chat_hint(error, has_turns=has_turns)
        fail(error, as_json=False)
        self._exit_code = self._exit_code or get_exit_code(error)
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        self._documents.append({"prompt": text, "error": fields})

    def _answer(self, prompt: str) -> None:
        self._answer_by(lambda conversation: partial(conversation.send, prompt))

    def _retry(self, rest: list[str]) -> None:
        _check_no_arguments(rest)
        self._answer_by(lambda conversation: conversation.retry)

    def _answer_by(self, choose: "Callable[[Conversation | RemoteConversation], _Send]") -> None:
        """Let the server answer; this process does if it is not to, and from then on."""
        if self._remote is not None:
            from expertctl.cli.remote_conversation import ServerLeftError

            try:
                return self._answer_with(choose(self._remote))
            except ServerLeftError:
                self._leave_server(self._remote)
        return self._answer_with(choose(self.start_here()))

    def _answer_with(self, send: "_Send") -> None:
        ending, loading = CancellationFlag(), LoadingProgress()
        if self._local is not None:
            loading = self._local.loading
        with ending.catch_signals(*((signal.SIGINT,) if self._interactive else ())):
            loading.is_cancelled = ending
            try:
                if self._remote is not None:  # waiting for it checks no flag
                    ending.raises = LoadingCancelledError
                turn = self._stream_answer(send(cancelled=ending), loading, ending)
            except LoadingCancelledError:
                print_message("  [interrupted before the first word]")
                return
        self._documents.append({"prompt": turn.prompt, **_get_document(turn)})
        self._show_turn(turn)
        if turn.has_messages:
            keep_conversation(self._settings, self.conversation.saved)

    def _stream_answer(
        self,
        pieces: "Generator[str, None, _AnyTurn]",
        loading: LoadingProgress,
        ending: CancellationFlag,
    ) -> "_AnyTurn":
        """Print the answer as it is generated; a progress bar shows loading before its start."""
        try:
            with show_loading("reading", as_json=self._as_json) as loading.report:
                piece = next(pieces)
                ending.raises = None
            with open_answer_stream() as shown:
                while True:
                    if not self._as_json:
                        shown.write(piece)
                    piece = next(pieces)
        except StopIteration as end:
            turn: _AnyTurn = end.value
            return turn
        finally:
            loading.report = None

    def _show_turn(self, turn: "_AnyTurn") -> None:
        from expertctl.cli.run_view import format_stage_times, format_statistics, format_turn

        answer = _get_answer(turn)
        known = {*self._warned, *answer.notes}  # /plan shows the notes
        new = [w for w in dict.fromkeys(answer.warnings) if w not in known]
        self._warned.update(new)
        warn(new)
        debug(format_stage_times(answer))
        note(format_turn(answer, replanned=turn.replanned), dim=True)
        if self._stats:
            print_message(format_statistics(answer))

    def _run_command(self, words: list[str]) -> None:
        name, *rest = words
        if name not in self._commands:
            raise UsageError(
                f"{name[:40]} is not a command",
                hint='/? lists them; put a message that begins with / between """ and """',
            )
        self._commands[name](rest)

    def _complete(self, line: str) -> list[str]:
        """Return what the last word of a line may become."""
        name, *rest = line.split(" ")
        if not rest:
            return [f"{each} " for each in self._commands if name]
        if name in {"/plan", "/save", "/load"}:
            *words, _ = rest
            start = len(" ".join(words)) + bool(words)
            return [each[start:] for each in complete_path(" ".join(rest))]
        if name == "/experts":
            with suppress(ExpertError):
                return ["auto ", "none ", *(f"{ref} " for ref in self._list_references())]
        known = {"/set": SETTINGS if len(rest) == 1 else ("default",), "/feedback": ("good", "bad")}
        return [f"{each} " for each in known.get(name, ())]

    def _list_references(self) -> list[str]:
        from expertctl.cli.run_view import find_fitting_experts

        if self._remote is not None:
            return [expert.ref for expert in self._remote.list_experts()]
        _, fitting, _ = find_fitting_experts(self.start_here(), self._planner)
        return [str(expert.stored.ref) for expert in fitting]

    def _show_help(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import CHAT_HELP

        _check_no_arguments(rest)
        print_message(CHAT_HELP)

    def _select_experts(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import (
            format_fitting_experts,
            format_plan_experts,
            format_served_experts,
        )

        if rest == ["auto"]:
            self.conversation.use_automatic_routing()
            print_message("experts are chosen for each message from now on")
        elif rest == ["none"]:
            self.conversation.use_base_only()
            print_message("from now on: the base alone; `/experts auto` chooses experts again")
        elif rest:
            plan = self.conversation.use_named(rest)
            print_message(f"from now on: {format_plan_experts(plan)}")
        elif self._remote is not None:
            experts, current = self._remote.list_experts(), self._remote.current_experts
            print_message(format_served_experts(experts, current))
        else:
            print_message(format_fitting_experts(self.start_here(), self._planner))

    def _show_plan(self, rest: list[str]) -> None:
        from expertctl.cli.remote_conversation import RemoteTurn
        from expertctl.cli.run_view import format_answer_plan, format_routing

        if (turn := self._last_turn) is None:
            raise NotFoundError("there is no plan yet", hint="send a message first")
        if rest:
            path = _parse_path(rest, "/plan FILE")
            document = _get_document(turn)
            save_plan(path, {name: document[name] for name in ("plan", "threads")})
            print_message(f"saved {path}")
        elif isinstance(turn, RemoteTurn):
            print_message(format_answer_plan(turn.answer))
        else:
            print_message(
                format_routing(turn.result.planned.result, width=terminal_width(sys.stderr))
            )

    def _record_feedback(self, rest: list[str]) -> None:
        from expertctl.cli.stats import parse_verdict, record_verdict

        verdict = parse_verdict(rest)
        if (turn := self._last_turn) is None:
            raise NotFoundError("there is no answer yet", hint="send a message first")
        if self._remote is not None and self._remote.is_named:
            raise UsageError(
                "the answer is in the history of its server",
                hint="`expertctl feedback JOB good` on that machine",
            )
        job_id = str(_get_document(turn)["job_id"])
        catalogue = self._open_catalogue()
        print_message(record_verdict(catalogue, job_id, verdict))

    def _open_catalogue(self) -> "Catalogue":
        """Return the history of the home, for which a chat with a server opens no engine."""
        if self._remote is None:
            return self._planner.catalogue
        return open_planner(self._settings, as_json=self._as_json).catalogue

    def _set_system(self, rest: list[str]) -> None:
        if rest:
            text = " ".join(rest)
            self.conversation.system = "" if text == "none" else text
        system = self.conversation.system
        print_message(f"system message: {system}" if system else "there is no system message")

    def _change_setting(self, rest: list[str]) -> None:
        """Set a sampling setting for the next answers, or show those that were set."""
        sampling: Any = self.conversation.sampling
        seed = self.conversation.seed
        if rest:
            sampling, seed = change_sampling(sampling, seed, rest[0], " ".join(rest[1:]))
            self.conversation.set_sampling(sampling, seed=seed)
        print_message(format_sampling(sampling, seed))

    def _save(self, rest: list[str]) -> None:
        path = _parse_path(rest, "/save FILE")
        write_file(path, encode_conversation(self.conversation.saved), mode=0o600)
        print_message(f"saved {path}")

    def _load(self, rest: list[str]) -> None:
        path = _parse_path(rest, "/load FILE")
        saved = read_conversation(path)
        self.conversation.restore(saved)
        print_message(f"{format_count(len(saved.messages), 'message')} read from {path}")

    def _reset_conversation(self, rest: list[str]) -> None:
        _check_no_arguments(rest)
        self.conversation.reset()
        print_message("the conversation is cleared")


def _get_answer(turn: "_AnyTurn") -> "RunAnswer":
    from expertctl.cli.remote_conversation import RemoteTurn
    from expertctl.cli.run_view import read_answer

    return turn.answer if isinstance(turn, RemoteTurn) else read_answer(turn.result)


def _get_document(turn: "_AnyTurn") -> dict[str, Any]:
    from expertctl.cli.remote_conversation import RemoteTurn

    return turn.document if isinstance(turn, RemoteTurn) else turn.result.to_json()


def _is_exit(message: ChatInput) -> bool:
    return message.is_command and message.text.strip() in EXIT_COMMANDS


def _parse_path(rest: list[str], usage: str) -> Path:
    if not rest:
        raise UsageError("there is no file name", hint=usage)
    text = " ".join(rest)
    try:
        os.fsencode(text)
        path = Path(text).expanduser()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{quote(text)} is not a file name", hint=usage) from error
    if "\0" in text:
        raise UsageError(f"{quote(text)} is not a file name", hint=usage)
    return path


def _check_no_arguments(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected argument {' '.join(rest)[:80]!r}", hint="see /?")
