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
_END_MARK = "---- end of command"
PORT = "8080"
_WAIT_UNTIL_LISTENING = (
    "for _ in {{1..300}}; do (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&- && break; sleep 0.1; done"
)
_STOP_SERVERS = "trap 'kill $(jobs -p) 2>&-; wait' EXIT"


@dataclass(frozen=True, slots=True)
class ConsoleCommand:
    """One command of a page and the output that the page shows for it."""

    command: str
    expected: tuple[str, ...]

    @property
    def may_fail(self) -> bool:
        return any(line.startswith("error:") for line in self.expected)

    @property
    def is_server(self) -> bool:
        return self.command.endswith("&")

    def with_port(self, port: int) -> "ConsoleCommand":
        """Return the same with another port in place of the one that the page names."""
        here = str(port)
        shown = tuple(line.replace(PORT, here) for line in self.expected)
        return ConsoleCommand(self.command.replace(PORT, here), shown)

    def script(self, port: int) -> str:
        """Return the command with the mark after its output."""
        listening = f"\n{_WAIT_UNTIL_LISTENING.format(port=port)}" if self.is_server else ""
        return f"{self.command}{listening}\nprintf '\\n{_END_MARK} %d\\n' $?\n"


def read_commands(page: Path) -> list[ConsoleCommand]:
    """Every command of a page, in order."""
    steps: list[ConsoleCommand] = []
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        steps += _parse_block(block.splitlines())
    return steps


def _parse_block(lines: list[str]) -> list[ConsoleCommand]:
    steps: list[ConsoleCommand] = []
    for line in lines:
        if line.startswith("$ "):
            steps.append(ConsoleCommand(line[2:], ()))
        elif line.startswith("> ") and not steps[-1].expected:
            steps[-1] = ConsoleCommand(f"{steps[-1].command}\n{line[2:]}", ())
        else:
            steps[-1] = ConsoleCommand(steps[-1].command, (*steps[-1].expected, line))
    return steps


def run_commands(
    steps: list[ConsoleCommand], *, folder: Path, environment: dict[str, str], limit_s: int
) -> list[str]:
    """Run the commands in one shell; return what does not match the page."""
    port = _find_free_port()
    steps = [step.with_port(port) for step in steps]
    script = "".join(step.script(port) for step in steps)
    result = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{_STOP_SERVERS}\n{script}"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    parts = re.split(rf"\n{_END_MARK} (\d+)\n", result.stdout)
    outputs, codes = parts[0:-1:2], parts[1::2]
    assert len(outputs) == len(steps), result.stdout[-2000:]
    return [
        f"$ {step.command}\n(exit {code})\n{output}"
        for step, output, code in zip(steps, outputs, codes, strict=True)
        if (code != "0") != step.may_fail or not matches_output(step.expected, output.splitlines())
    ]


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def matches_output(expected: tuple[str, ...], lines: list[str]) -> bool:
    """Tell whether output lines fit what the page shows; a page may show nothing at all."""
    pattern = [line.rstrip() for line in expected if line.strip()]
    actual = [line.rstrip() for line in lines if line.strip()]
    return not pattern or _match_lines(pattern, actual)


def _match_lines(pattern: list[str], lines: list[str]) -> bool:
    if not pattern:
        return not lines
    if pattern[0] == "…":
        return any(_match_lines(pattern[1:], lines[i:]) for i in range(len(lines) + 1))
    return (
        bool(lines) and _match_line(pattern[0], lines[0]) and _match_lines(pattern[1:], lines[1:])
    )


def _match_line(pattern: str, line: str) -> bool:
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in pattern)
    return fnmatch.fnmatchcase(line, literal.replace("…", "*"))
