"""What chats keep in the home, and the editing of lines at a terminal.

::

    chat-history            the last 1,000 lines that were typed, a JSON string each; mode 0600
    last-conversation.json  for ``--continue``, see `expertctl.engine.request`; mode 0600

The setting ``history`` switches both off; `expertctl.cli.logs` keeps more, if the user wants that.
Where one of them cannot be read or written, a chat goes on without it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from expertctl.cli.output import debug
from expertctl.cli.prompt_input import ReadLine
from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError, UsageError
from expertctl.files import (
    hold_lock,
    make_folders,
    open_regular_file,
    remove_leftovers,
    write_atomic,
)
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.engine.request import SavedConversation
    from expertctl.routing.plan import Plan

MAX_LINES = 1000
_LOCK_SECONDS = 5.0
_MAX_LINES_BYTES, MAX_CONVERSATION_BYTES = 1 << 24, 1 << 24
_SAVE_HINT = "name a file that /save wrote"

Complete = Callable[[str], Sequence[str]]
"""Takes a line up to the cursor; returns what its last word may become."""


def read_conversation(path: Path, *, hint: str = _SAVE_HINT) -> "SavedConversation":
    """Return a saved conversation.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: when it holds no conversation.
    """
    from expertctl.engine.request import SavedConversation

    return SavedConversation.parse(_read_document(path, hint), what=str(path), hint=hint)


def _read_document(path: Path, hint: str) -> bytes:
    try:
        with open_regular_file(path) as stream:
            data = stream.read(MAX_CONVERSATION_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise NotFoundError(f"{path} cannot be read: {reason}", hint=hint) from error
    if len(data) > MAX_CONVERSATION_BYTES:
        problem = f"more than {MAX_CONVERSATION_BYTES} bytes, the maximum of a conversation"
        raise InvalidPackageError(str(path), [problem], hint=hint)
    return data


class Kept(Protocol):
    """A conversation: of an engine, or of a server."""

    def to_json(self) -> Mapping[str, object]:
        """Return its document."""


def encode_conversation(saved: Kept) -> bytes:
    """Return the content of a file that `read_conversation` reads."""
    return (json.dumps(saved.to_json(), ensure_ascii=False, indent=1) + "\n").encode()


def keep_conversation(settings: Settings, saved: Kept, *, plan: "Plan | None" = None) -> None:
    """Keep a conversation as the last one, in place of the one before, if ``history`` is on.

    With ``logs``, its last turn is kept, too; ``plan`` answered it if the conversation has none.
    """
    if settings.logs:
        from expertctl.cli.logs import log_answer

        document = saved.to_json()
        answered: Any = document.get("plan") or (plan.to_json() if plan is not None else {})
        log_answer(settings, document, answered)
    if settings.history:
        data = encode_conversation(saved)
        _write_private(settings.home.last_conversation, lambda _: data)


def read_last_conversation(settings: Settings) -> "SavedConversation":
    """Return the last conversation.

    Raises:
        UsageError: when the setting ``history`` is off.
        NotFoundError: when there is none.
        InvalidPackageError: when its file is damaged.
    """
    path = _find_last_conversation(settings)
    return read_conversation(path, hint=f"leave out --continue, or delete {path}")


def read_last_document(settings: Settings) -> bytes:
    """Return the document of the last conversation, unchecked; raises as the function above."""
    path = _find_last_conversation(settings)
    return _read_document(path, f"leave out --continue, or delete {path}")


def _find_last_conversation(settings: Settings) -> Path:
    path = settings.home.last_conversation
    if not settings.history:
        hint = "`expertctl config set history yes` keeps the last one"
        raise UsageError("conversations are not kept: the setting `history` is off", hint=hint)
    if not path.exists():
        hint = "leave out --continue; the next run can be continued"
        raise NotFoundError("there is no conversation to continue", hint=hint)
    return path


def find_last_base(saved: "SavedConversation", settings: Settings) -> str | None:
    """Return the base that answered last in a conversation, if it still exists."""
    from expertctl.store.bases import BaseStore

    if saved.plan is None:
        return None
    name = saved.plan.base
    known = BaseStore(settings.home.bases).list_bases()
    return name if any(base.name == name for base in known) else None


@contextmanager
def open_line_editor(
    path: Path | None, complete: Complete, read_line: ReadLine
) -> Iterator[ReadLine]:
    """Recall the lines in a file and complete with the tab key; yield a reader.

    At the end, the lines that it returned are added to the file.
    """
    typed: list[str] = []

    def read(prompt: str) -> str | None:
        line = read_line(prompt)
        if line is not None and line.strip():
            typed.append(line)
        return line

    with _use_readline(path, complete):
        try:
            yield read
        finally:
            _add_lines(path, typed)


@contextmanager
def _use_readline(path: Path | None, complete: Complete) -> Iterator[None]:
    try:
        import readline
    except ImportError:  # it is not on every system, nor needed
        yield
        return
    is_libedit = "libedit" in (readline.__doc__ or "")
    for command in ("bind ^I rl_complete",) if is_libedit else _READLINE_COMMANDS:
        readline.parse_and_bind(command)
    readline.set_completer_delims(" ")
    readline.set_completer(_make_completer(complete))
    for line in _read_lines(path):
        with suppress(ValueError):  # of characters that the terminal's encoding lacks
            readline.add_history(line)
    try:
        yield
    finally:
        readline.set_completer(None)


_READLINE_COMMANDS = ("tab: complete", "set enable-bracketed-paste on")


def _make_completer(complete: Complete) -> Callable[[str, int], str | None]:
    import readline

    found: list[str] = []

    def complete_word(word: str, number: int) -> str | None:
        if number == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            found[:] = [each for each in complete(line) if each.startswith(word)]
        return found[number] if number < len(found) else None

    return complete_word


def complete_path(word: str) -> list[str]:
    """Return the files and folders that a word may become."""
    folder, _, name = word.rpartition("/")
    start = f"{folder}/" if "/" in word else ""
    found = []
    with suppress(OSError):
        for each in sorted(os.scandir(Path(start or ".").expanduser()), key=lambda e: e.name):
            if each.name.startswith(name) and (name or not each.name.startswith(".")):
                found.append(f"{start}{each.name}{'/' if each.is_dir() else ' '}")
    return found


def _read_lines(path: Path | None) -> list[str]:
    """Return the lines of earlier chats; a file that is not ours is left out."""
    if path is None:
        return []
    try:
        with open_regular_file(path) as stream:
            lines = [json.loads(line) for line in stream.read(_MAX_LINES_BYTES).splitlines()]
    except NotFoundError:
        return []
    except (ExpertError, OSError, ValueError, RecursionError) as error:
        debug(f"{path} is not used: {error}")
        return []
    return [line for line in lines if isinstance(line, str)][-MAX_LINES:]


def _add_lines(path: Path | None, typed: Sequence[str]) -> None:
    def encode(path: Path) -> bytes:
        lines = [*_read_lines(path), *typed][-MAX_LINES:]
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode()

    if path is not None and typed:
        _write_private(path, encode)


def _write_private(path: Path, encode: Callable[[Path], bytes]) -> None:
    """Replace a file by what ``encode`` returns while no other process may change it."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        make_folders(path.parent, mode=0o700)
        with hold_lock(lock, guarded=path, seconds=_LOCK_SECONDS):
            remove_leftovers(path)
            write_atomic(path, encode(path), mode=0o600)
    except (ExpertError, OSError) as error:
        debug(f"{path} cannot be written: {error}")
