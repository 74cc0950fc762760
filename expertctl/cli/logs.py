"""``expertctl logs``: prompts and answers that were kept, if the setting ``logs`` is on.

It is off unless the user switches it on, because prompts may be private. ``logs.jsonl`` in the home
has a line of JSON for each answer of ``run`` and ``chat``, mode 0600. At `MAX_BYTES` it becomes
``logs.jsonl.1``, in place of the one before. A line that is damaged is left out.
"""

import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from expertctl.cli.output import JsonFlag, debug, emit, format_count, note
from expertctl.errors import ExpertError
from expertctl.files import hold_lock, make_folders, open_regular_file
from expertctl.settings import Home, Settings, load_settings

MAX_BYTES = 32 << 20
_MAX_SHOWN = 10_000
_LOCK_SECONDS = 5.0
_SHOWN_TEXT = 400
"""Characters of a prompt or an answer that are shown without ``--full``."""


class LoggedAnswer(msgspec.Struct, frozen=True):
    """A line of the file; ``base`` and ``experts`` are those of the plan that answered."""

    time: str
    prompt: str
    answer: str
    base: str | None = None
    experts: tuple[str, ...] = ()
    system: str | None = None


def log_answer(settings: Settings, saved: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Add the last turn of a conversation to the file, if ``logs`` is on; failures are no error.

    ``saved`` is the document of a conversation, ``plan`` that of the plan that answered.
    """
    if not settings.logs:
        return
    first, *_ = messages = saved["messages"]
    entry = LoggedAnswer(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        prompt=messages[-2]["content"],
        answer=messages[-1]["content"],
        base=plan.get("base"),
        experts=tuple(expert["ref"] for expert in plan.get("experts", ())),
        system=first["content"] if first["role"] == "system" else None,
    )
    path = settings.home.logs
    try:
        make_folders(path.parent, mode=0o700)
        with hold_lock(path.with_name(f"{path.name}.lock"), guarded=path, seconds=_LOCK_SECONDS):
            _append(path, msgspec.json.encode(entry) + b"\n")
    except (ExpertError, OSError) as error:
        debug(f"{path} cannot be written: {error}")


def _append(path: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    if path.is_file() and path.stat().st_size + len(line) > MAX_BYTES:
        path.replace(_older(path))
    with os.fdopen(os.open(path, flags, 0o600), "ab") as stream:
        if stream.tell() and not _ends_with_newline(path):  # a process was killed while it wrote
            stream.write(b"\n")
        stream.write(line)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def read_logs(home: Home) -> Iterator[LoggedAnswer]:
    """Yield the entries, the newest first."""
    for path in (home.logs, _older(home.logs)):
        try:
            with open_regular_file(path) as stream:
                lines = stream.read(MAX_BYTES + 1).splitlines()
        except (ExpertError, OSError) as error:
            debug(f"{path} is not read: {error}")
            continue
        for line in reversed(lines):
            try:
                yield msgspec.json.decode(line, type=LoggedAnswer)
            except (msgspec.MsgspecError, RecursionError):
                debug(f"{path}: a damaged line is left out")


def logs(
    query: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only those with this text.")
    ] = None,
    count: Annotated[
        int,
        typer.Option("--number", "-n", min=1, max=_MAX_SHOWN, help="How many of the newest."),
    ] = 3,
    full: Annotated[bool, typer.Option("--full", help="Show long texts to their end.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete all kept prompts and answers.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show prompts and answers that were kept, if the setting logs is on.

    Example: expertctl logs -n 10 capital
    """
    settings = load_settings()
    if clear:
        found = sum(1 for _ in read_logs(settings.home))
        for path in (settings.home.logs, _older(settings.home.logs)):
            path.unlink(missing_ok=True)
        emit({"cleared": found}, f"deleted {format_count(found, 'kept answer')}", as_json=as_json)
        return
    wanted = re.compile(re.escape(query or ""), re.IGNORECASE)
    entries: list[LoggedAnswer] = []
    for entry in read_logs(settings.home):
        if wanted.search(entry.prompt) or wanted.search(entry.answer):
            entries.append(entry)
        if len(entries) == count:
            break
    if not settings.logs:
        note("nothing is kept now: `expertctl config set logs yes` keeps prompts and answers")
    elif not entries:
        note("no answers are kept" if query is None else "none of the kept answers has this text")
    text = "\n\n".join(_format_entry(entry, full=full) for entry in reversed(entries))
    emit({"logs": [msgspec.to_builtins(entry) for entry in entries]}, text, as_json=as_json)


def _format_entry(entry: LoggedAnswer, *, full: bool) -> str:
    time = datetime.fromisoformat(entry.time).astimezone().isoformat(" ", timespec="seconds")
    who = " + ".join(entry.experts) or "the base alone"
    lines = [f"{time[:19]}  {entry.base or '-'}  {who}"]
    if entry.system:
        lines.append(f"system: {_shorten(entry.system, full=full)}")
    lines.append(f"> {_shorten(entry.prompt, full=full)}")
    lines.append(_shorten(entry.answer, full=full))
    return "\n".join(lines)


def _shorten(text: str, *, full: bool) -> str:
    return text if full or len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…"
