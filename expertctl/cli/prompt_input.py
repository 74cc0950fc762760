"""From the words of a command line and stdin to a prompt, its body, and a saved plan.

::

    run "Sort these:"                     the prompt
    run Sort these numbers: 3, 1          the prompt, its words joined
    echo 3, 1 | run "Sort these:"         the prompt, and piped text as its body
    echo "Sort 3, 1" | run                piped text as the prompt; also run -
    echo 3, 1 | run "Sort these:" --body -

One thing at most is read from stdin.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.piped import is_piped, read_limited, read_text, waiting_text
from expertctl.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from expertctl.routing.plan_file import SavedPlan

STDIN = "-"
_BODY_HINT = "name a text file, or - for stdin"
_PROMPT_HINT = 'expertctl run "Sort these numbers: 3, 1, 2"; a prompt may be piped, too'


@dataclass(frozen=True, slots=True)
class PromptInput:
    """What a user wants to be read: the prompt, and the text that follows it."""

    prompt: str
    body: str | None


def read_prompt(words: Sequence[str] | None) -> str:
    """Return the prompt of a command that reads nothing else: of its words, else of stdin.

    Raises:
        UsageError: when there is none.
        InvalidPackageError: when stdin is not UTF-8.
    """
    return _given(words) or _piped_prompt(words)


def read_input(
    words: Sequence[str] | None, body: str | None, *, plan: Path | None = None
) -> PromptInput:
    """Return prompt and body; ``body`` and ``plan`` are the values of the options.

    Raises:
        UsageError: when there is no prompt, or two texts are to come from stdin.
        NotFoundError: when the file of the body cannot be read.
        InvalidPackageError: when a text is not UTF-8.
    """
    prompt = _given(words)
    wanted = {"the prompt": prompt is None, "the body": body == STDIN, "the plan": _is_stdin(plan)}
    _refuse_two([name for name, is_wanted in wanted.items() if is_wanted])
    if prompt is None:
        return PromptInput(_piped_prompt(words), read_body(body))
    if body is None and not _is_stdin(plan):
        return PromptInput(prompt, waiting_text("the body"))
    return PromptInput(prompt, read_body(body))


def read_body(source: str | None) -> str | None:
    """Return the text of ``--body``: of a file, or for ``-`` of stdin.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: when it is not UTF-8.
    """
    if source is None or source == STDIN:
        return None if source is None else read_text("the body")
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return read_limited(stream, str(path))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file", hint=_BODY_HINT) from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise NotFoundError(message, hint=_BODY_HINT) from error


def saved_plan(source: Path | None) -> "SavedPlan | None":
    """Return the plan of ``--plan``: of a file, or for ``-`` of stdin."""
    from expertctl.routing.plan_file import MAX_PLAN_BYTES, parse_plan, read_plan

    if source is None or not _is_stdin(source):
        return None if source is None else read_plan(source)
    if sys.stdin is None:
        raise UsageError("the plan: stdin is closed", hint="write it to a file: --plan FILE")
    return parse_plan(sys.stdin.buffer.read(MAX_PLAN_BYTES + 1), what="the plan on stdin")


def _given(words: Sequence[str] | None) -> str | None:
    """Return the prompt of a command line; None where it is to come from stdin."""
    return None if not words or list(words) == [STDIN] else " ".join(words)


def _piped_prompt(words: Sequence[str] | None) -> str:
    if not words and not is_piped():
        raise UsageError("there is no prompt", hint=_PROMPT_HINT)
    return read_text("the prompt")


def _is_stdin(path: Path | None) -> bool:
    return path is not None and str(path) == STDIN


def _refuse_two(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise UsageError(
            f"{' and '.join(names)} cannot both come from stdin",
            hint="write one of them to a file: --body FILE, --plan FILE",
        )
