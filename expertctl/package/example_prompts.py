"""Example prompts for ``routing.examples``, read from a file that people write.

One prompt a line, in UTF-8; or JSON Lines, objects with a ``prompt``, as files of evaluation
samples are. Blank lines are passed over. All problems are reported at once, each with its line.
"""

from pathlib import Path

from expertctl.errors import InvalidPackageError
from expertctl.schema.json_lines import read_lines
from expertctl.schema.strict_json import load_object

MAX_EXAMPLES = 200
MAX_CHARACTERS = 2000
MAX_BYTES = 4 << 20
_HINT = 'write one prompt a line, or JSON objects such as {"prompt": "Sort 3, 1, 2"}'


def read_examples(path: Path) -> list[str]:
    """Return the prompts of a file, each once.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file.
    """
    data = read_lines(path)
    if len(data) > MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {MAX_BYTES >> 20} MiB"], hint=_HINT)
    examples: list[str] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            examples += _examples_in(line)
        except InvalidPackageError as error:
            problems += [f"line {number}: {problem}" for problem in error.problems]
    examples = list(dict.fromkeys(examples))
    if not examples and not problems:
        problems.append("there is no prompt in it")
    if len(examples) > MAX_EXAMPLES:
        problems.append(f"{len(examples)} prompts, at most {MAX_EXAMPLES} are allowed")
    if problems:
        raise InvalidPackageError(str(path), problems, hint=_HINT)
    return examples


def _examples_in(line: bytes) -> list[str]:
    """Return the prompt of a line; none of a blank one."""
    text = _decoded(line).strip()
    if text.startswith("{"):
        found = load_object(line, what="prompt", max_bytes=MAX_BYTES).get("prompt")
        if not isinstance(found, str) or not found.strip():
            raise InvalidPackageError("prompt", ["an object without a text called prompt"])
        text = found.strip()
    if len(text) > MAX_CHARACTERS:
        problem = f"{len(text)} characters, at most {MAX_CHARACTERS} are allowed"
        raise InvalidPackageError("prompt", [problem])
    return [text] if text else []


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidPackageError("prompt", ["not UTF-8"]) from error
