"""What chats keep in the home, and the editing of lines at a terminal.

::

    chat-history            the last 1,000 lines that were typed, a JSON string each; mode 0600
    last-conversation.json  for ``run --continue``, see `expertctl.engine.conversation`; mode 0600

The setting ``history`` switches both off. Where one of them cannot be read or written, a chat goes
on without it.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.output import debug
from expertctl.errors import InvalidPackageError, NotFoundError, UsageError
from expertctl.files import write_atomic
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.engine.request import SavedConversation

MAX_LINES = 1000
_MAX_LINES_BYTES, MAX_CONVERSATION_BYTES = 1 << 24, 1 << 24
_SAVE_HINT = "name a file that /save wrote, or one with the messages of a chat request"

Complete = Callable[[str], Sequence[str]]
"""Takes a line up to the cursor; returns what its last word may become."""


def read_conversation(path: Path) -> "SavedConversation":
    """Return a saved conversation.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: when it holds no conversation.
    """
    from expertctl.engine.request import SavedConversation

    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CONVERSATION_BYTES + 1)
    except OSError as error:
        reason = error.strerror or error
        raise NotFoundError(f"{path} cannot be read: {reason}", hint=_SAVE_HINT) from error
    if len(data) > MAX_CONVERSATION_BYTES:
        problem = f"more than {MAX_CONVERSATION_BYTES} bytes, the maximum of a conversation"
        raise InvalidPackageError(str(path), [problem], hint=_SAVE_HINT)
    return SavedConversation.parse(data, what=str(path))


def encode_conversation(saved: "SavedConversation") -> bytes:
    """Return the content of a file that `read_conversation` reads."""
    return (json.dumps(saved.to_json(), ensure_ascii=False, indent=1) + "\n").encode()


def keep_conversation(settings: Settings, saved: "SavedConversation") -> None:
    """Keep a conversation as the last one, in place of the one before, if ``history`` is on."""
    if settings.history:
        _write_private(settings.home.last_conversation, encode_conversation(saved))


def read_last_conversation(settings: Settings) -> "SavedConversation":
    """Return the last conversation.

    Raises:
        UsageError: when the setting ``history`` is off.
        NotFoundError: when there is none.
        InvalidPackageError: when its file is damaged.
    """
    path = settings.home.last_conversation
    if not settings.history:
        hint = "`expertctl config set history yes` keeps the last one"
        raise UsageError("conversations are not kept: the setting `history` is off", hint=hint)
    if not path.exists():
        hint = "leave out --continue; the next run can be continued"
        raise NotFoundError("there is no conversation to continue", hint=hint)
    return read_conversation(path)


@contextmanager
def open_line_editor(path: Path | None, complete: Complete) -> Iterator[None]:
    """Recall the lines in a file, complete with the tab key, and add the typed lines at the end."""
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
        readline.add_history(line)
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        readline.set_completer(None)
        count = readline.get_current_history_length()
        typed = [readline.get_history_item(number + 1) for number in range(before, count)]
        _add_lines(path, [line for line in typed if line.strip()])


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
        with path.open("rb") as stream:
            lines = [json.loads(line) for line in stream.read(_MAX_LINES_BYTES).splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        debug(f"{path} is not used: {error}")
        return []
    return [line for line in lines if isinstance(line, str)][-MAX_LINES:]


def _add_lines(path: Path | None, typed: Sequence[str]) -> None:
    if path is not None and typed:
        lines = [*_read_lines(path), *typed][-MAX_LINES:]
        _write_private(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def _write_private(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data, mode=0o600)
    except OSError as error:
        debug(f"{path} cannot be written: {error.strerror or error}")
