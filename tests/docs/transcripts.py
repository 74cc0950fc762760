"""Reads the ``console`` blocks of a Markdown page and runs them in one shell, in order.

A line that begins with ``$ `` is a command (with ``> `` lines continuing it); what follows is the
output a reader will see, stdout and stderr together, where ``…`` is anything. A command must
succeed unless the output shown has a line that begins with ``error:``.

A command that ends in ``&`` is a server on port 8080. It gets a free port instead, wherever the
page names that port; the next command comes when it listens, and it is stopped at the end.
"""

import fnmatch
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MARK = "---- end of command"
PORT = "8080"
_WHEN_IT_LISTENS = (
    "for _ in {{1..300}}; do (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&- && break; sleep 0.1; done"
)
_AT_THE_END = "trap 'kill $(jobs -p) 2>&-; wait' EXIT"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page and the output that the page shows for it."""

    command: str
    shown: tuple[str, ...]

    @property
    def may_fail(self) -> bool:
        return any(line.startswith("error:") for line in self.shown)

    @property
    def is_server(self) -> bool:
        return self.command.endswith("&")

    def at(self, port: int) -> "Step":
        """Return the same with another port in place of the one that the page names."""
        here = str(port)
        shown = tuple(line.replace(PORT, here) for line in self.shown)
        return Step(self.command.replace(PORT, here), shown)

    def script(self, port: int) -> str:
        """Return the command with the mark after its output."""
        listening = f"\n{_WHEN_IT_LISTENS.format(port=port)}" if self.is_server else ""
        return f"{self.command}{listening}\nprintf '\\n{_MARK} %d\\n' $?\n"


def steps_of(page: Path) -> list[Step]:
    """Every command of a page, in order."""
    steps: list[Step] = []
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        steps += _steps(block.splitlines())
    return steps


def _steps(lines: list[str]) -> list[Step]:
    steps: list[Step] = []
    for line in lines:
        if line.startswith("$ "):
            steps.append(Step(line[2:], ()))
        elif line.startswith("> ") and not steps[-1].shown:
            steps[-1] = Step(f"{steps[-1].command}\n{line[2:]}", ())
        else:
            steps[-1] = Step(steps[-1].command, (*steps[-1].shown, line))
    return steps


def run(steps: list[Step], *, folder: Path, environment: dict[str, str], limit_s: int) -> list[str]:
    """Run the commands in one shell; return what does not match the page."""
    port = _free_port()
    steps = [step.at(port) for step in steps]
    script = "".join(step.script(port) for step in steps)
    result = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{_AT_THE_END}\n{script}"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    parts = re.split(rf"\n{_MARK} (\d+)\n", result.stdout)
    outputs, codes = parts[0:-1:2], parts[1::2]
    assert len(outputs) == len(steps), result.stdout[-2000:]
    return [
        f"$ {step.command}\n(exit {code})\n{output}"
        for step, output, code in zip(steps, outputs, codes, strict=True)
        if (code != "0") != step.may_fail or not matches(step.shown, output.splitlines())
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def matches(shown: tuple[str, ...], lines: list[str]) -> bool:
    """Tell whether output lines fit what the page shows; a page may show nothing at all."""
    pattern = [line.rstrip() for line in shown if line.strip()]
    actual = [line.rstrip() for line in lines if line.strip()]
    return not pattern or _fits(pattern, actual)


def _fits(pattern: list[str], lines: list[str]) -> bool:
    if not pattern:
        return not lines
    if pattern[0] == "…":
        return any(_fits(pattern[1:], lines[i:]) for i in range(len(lines) + 1))
    return bool(lines) and _line_fits(pattern[0], lines[0]) and _fits(pattern[1:], lines[1:])


def _line_fits(pattern: str, line: str) -> bool:
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in pattern)
    return fnmatch.fnmatchcase(line, literal.replace("…", "*"))
