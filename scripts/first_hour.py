"""Writes ``docs/transcripts/first-hour-*.txt``: what a user sees in the first hour, in a terminal.

The commands run in tmux, in bash, with an empty home, at each width of `WIDTHS`. What differs from
run to run is replaced: digests, keys, times, ports and paths. Lines that the terminal itself wraps
are joined, as they are when they are copied. Run ``python -m scripts.first_hour``.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertctl.install.installer import STARTER

TRANSCRIPTS = Path(__file__).parent.parent / "docs" / "transcripts"
WIDTHS = (80, 120)
_HEIGHT, _HISTORY = 50, 20_000
_LIMIT_S, _POLL_S = 300.0, 0.05
_SHELL, _CHAT = "$", ">"
_PORTS = {"SERVER": 18_000, "REGISTRY": 18_080}
_VARYING = (
    (r"sha256:[0-9a-f]{64}", "sha256:" + "0123456789abcdef" * 4),
    (r'(?<="job_id": ")[0-9a-f]{32}', "0123456789abcdef" * 2),
    (r"(?<=chatcmpl-)[0-9a-f]+", "0123456789abcdef"),
    (r"(?m)^[0-9a-f]{16}(?=  registry\.init)", "0123456789abcdef"),
    (r"(?m)^[0-9a-f]{8}(?=  \d\d-\d\d \d\d:\d\d)|(?<=^job )[0-9a-f]{8}", "01234567"),
    (r"(?m)(?<=  )[0-9a-f]{12}$", "0123456789ab"),
    (r"(?<=fp_)[0-9a-f]{12}", "0123456789ab"),
    (r"(?m)^\[1\] \d+$", "[1] 4321"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-14T12:00:00Z"),
    (r"\d{4}-\d\d-\d\d", "2026-01-14"),
    (r"2026-01-14 to", "2026-01-01 to"),
    (r"\d\d-\d\d \d\d:\d\d", "01-14 12:00"),
    (r'(?<="created":)\d+', "1768392000"),
    (
        r"\d+ tokens/s,\s+first\s+after\s+\d+ ms,\s+\d+ ms\s+in\s+all",
        "200 tokens/s, first after 100 ms, 200 ms in all",
    ),
    (r";\s+\d+ tokens/s\]", "; 200 tokens/s]"),
    (r"(?m)^(01234567 .*  )\d{1,4} {5,7}(?=\S)", r"\g<1>200       "),
    (r"(?m)(SAID +)FIRST +TOTAL$", r"\1FIRST   TOTAL"),
    (r"(?m)(?:  +(?:\d+ ms|[\d.]+ s)){2}$", "  100 ms  200 ms"),
    (r"most (?:\d+ ms|[\d.]+ s)", "most 200 ms"),
)
"""What differs from run to run, and what stands for it."""
_INTRODUCTION = """\
The first hour with expertctl, in a terminal of {width} columns. Written by
`python -m scripts.first_hour`; digests, keys, times, ports and paths are replaced.
"""


SESSION = r"""
$ # A first answer
$ expertctl --help
$ expertctl run "Sort these numbers: 41, 17, 23, 15"
$ expertctl run --json --seed 7 "Sort these numbers: 30, 20, 10" | head -c 300; echo
$ expertctl run --no-experts "Sort these numbers: 41, 17, 23, 15"
$ expertctl list
$ expertctl info starter/sorting
$ expertctl inspect starter/sorting
$ expertctl base list
$ expertctl route "What is the plural of wolfberry?"
$ # A chat
$ expertctl chat
> What is the plural of wolfberry?
> /plan
> /experts
> /set
> /wrong
> /feedback good
> /bye
$ # Mistakes
$ expertctl isntall acme/sql
$ expertctl run --expert starter/sortng hello
$ expertctl run --temprature 0.5 hello
$ expertctl run --temperature hot hello
$ expertctl install acme/sql
$ expertctl search sql
$ expertctl info acme/sql
$ expertctl remove acme/sql
$ expertctl build my-lora
$ expertctl outdated
$ # An expert of one's own
$ ls my-lora
$ expertctl keys new me --namespace local --namespace acme
$ expertctl keys list
$ expertctl init my-lora --name acme/sorter --base starter/base
$ expertctl build my-lora -o sorter.expert
$ expertctl install sorter.expert
$ expertctl eval sorter.expert
$ expertctl eval sorter.expert --data data.jsonl
$ expertctl sign sorter.expert --key me
$ expertctl verify sorter.expert
$ expertctl inspect sorter.expert
$ expertctl install sorter.expert
$ expertctl run --expert acme/sorter "Sort these numbers: 93, 82, 71"
$ expertctl feedback last good
$ expertctl list
$ expertctl why acme/sorter
$ # A server
$ expertctl serve --port SERVER 2> serve.log &
$ until curl -sf localhost:SERVER/readyz; do sleep 0.1; done; echo
$ curl -s localhost:SERVER/v1/chat/completions --json @chat.json | head -c 400; echo
$ expertctl serve key list
$ kill $!; wait
$ grep ^ready serve.log
$ # A registry
$ expertctl registry init shop --port REGISTRY > admin.token 2> shop.txt; cat shop.txt
$ expertctl registry serve shop 2> shop.log &
$ until curl -sf localhost:REGISTRY/healthz; do sleep 0.1; done; echo
$ expertctl trust registry list
$ expertctl login 127.0.0.1:REGISTRY --token-stdin < admin.token
$ expertctl config set registry 127.0.0.1:REGISTRY
$ expertctl publish sorter.expert
$ expertctl registry namespace add acme
$ expertctl registry keys add me --namespace acme
$ expertctl publish sorter.expert
$ expertctl search sort
$ expertctl info acme/sorter
$ expertctl remove acme/sorter
$ expertctl install acme/sorter
$ print=$(sed -n 's/^fingerprint //p' shop.txt)
$ expertctl trust registry add 127.0.0.1:REGISTRY --fingerprint $print
$ expertctl install acme/sorter
$ expertctl list
$ expertctl outdated
$ expertctl registry namespace list
$ expertctl registry user list
$ expertctl token list
$ expertctl trust registry list
$ kill $!; wait
$ # What is there
$ expertctl doctor
$ expertctl stats
$ expertctl keys list
$ expertctl trust list
$ expertctl config list
$ expertctl base plan starter/base --memory 1GB
$ expertctl remove starter/exclaim
$ expertctl gc --dry-run
$ expertctl help keys
"""
"""What the user types, after the prompt of the shell or of a chat."""
_CHAT_REQUEST = (
    '{"model": "auto", "messages": [{"role": "user", "content": "Sort these numbers: 30, 20, 10"}]}'
)
_DATA = '{"prompt": "Sort these numbers: 93, 82, 71", "answer": "71, 82, 93"}\n'


class Terminal:
    """A bash in a tmux of its own."""

    def __init__(self, folder: Path, *, width: int) -> None:
        """Remember where the shell runs; nothing is started."""
        self._folder, self._width = folder, width
        self._socket, self._prompted = folder / "tmux", folder / "prompted"
        self._counts = {_SHELL: 1, _CHAT: 0}
        """How many prompts were shown, the next one included."""

    @contextmanager
    def run(self, environment: dict[str, str]) -> Iterator[None]:
        """Start the shell; end all that it started."""
        setup = self._folder / "setup"
        setup.write_text(
            f"set +mH; unset HISTFILE; PS1='$ '; PROMPT_COMMAND='echo >> {self._prompted}'\n"
        )
        shell = shlex.join(["bash", "--noprofile", "--rcfile", str(setup), "-i"])
        size = ("-x", str(self._width), "-y", str(_HEIGHT))
        self._start(
            environment,
            "-f",
            "/dev/null",
            "set-option",
            "-g",
            "history-limit",
            str(_HISTORY),
            ";",
            "new-session",
            "-d",
            *size,
            "-c",
            environment["HOME"],
            shell,
        )
        try:
            self._wait(_SHELL)
            yield
        finally:
            self._tmux("kill-server")

    def enter(self, line: str, *, then: str) -> None:
        """Type a line, and wait until the shell or the chat asks for the next one."""
        self._counts[then] += 1
        self._tmux("send-keys", "-l", line)
        self._tmux("send-keys", "Enter")
        self._wait(then)

    def read(self) -> str:
        """Return all that the terminal has shown; lines that it wrapped are joined."""
        shown = self._tmux("capture-pane", "-p", "-J", "-S", "-")
        return "\n".join(line.rstrip() for line in shown.rstrip().split("\n"))

    def _wait(self, prompt: str) -> None:
        until = time.monotonic() + _LIMIT_S
        while not self._is_asking(prompt):
            if time.monotonic() > until:
                raise TimeoutError(f"no prompt after {_LIMIT_S:.0f} s:\n{self.read()}")
            time.sleep(_POLL_S)

    def _is_asking(self, prompt: str) -> bool:
        shown = self.read().split("\n")
        if prompt == _SHELL:
            count = len(self._prompted.read_bytes()) if self._prompted.exists() else 0
        else:
            count = sum(f"{line} ".startswith(f"{_CHAT} ") for line in shown)
        return count == self._counts[prompt] and shown[-1] == prompt

    def _start(self, environment: dict[str, str], *words: str) -> None:
        command = ["tmux", "-S", str(self._socket), *words]
        subprocess.run(command, env=environment, check=True)  # noqa: S603  # our own arguments

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603  # our own arguments


def record(*, width: int) -> str:
    """Return the transcript of the session in a terminal of ``width`` columns."""
    lines = [(line[0], line[2:]) for line in SESSION.strip().splitlines()]
    with tempfile.TemporaryDirectory(
        prefix="hour-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        home = _make_home(folder)
        ports = {role: _find_port(port, width=width) for role, port in _PORTS.items()}
        terminal = Terminal(folder, width=width)
        environment = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(TRANSCRIPTS.parent.parent),
            # It is about noon: `stats` counts by local day, and a session across midnight has two.
            "TZ": f"NOON{time.gmtime().tm_hour - 12:+d}",
        }
        with terminal.run(environment):
            for (_, line), (then, _) in zip(lines, [*lines[1:], (_SHELL, "")], strict=True):
                typed = re.sub("|".join(ports), lambda found: str(ports[found[0]]), line)
                terminal.enter(typed, then=then)
            shown = terminal.read()
    text = shown.removesuffix(f"\n{_SHELL}").replace(str(home), "~")
    for role, port in ports.items():
        text = text.replace(str(port), str(_PORTS[role]))
    return _INTRODUCTION.format(width=width) + "\n" + normalise(text) + "\n"


def _make_home(folder: Path) -> Path:
    """Make a home with nothing but the LoRA of an expert of the starter pack, as PEFT saves it."""
    home, spare = folder / "home", folder / "spare"
    home.mkdir()
    command = [sys.executable, "-m", "expertctl", "unpack", str(STARTER / "sorting.expert")]
    environment = {**os.environ, "EXPERT_HOME": str(spare)}
    command.append(str(folder / "unpacked"))
    subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603  # our own program
    (home / "my-lora").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / "unpacked" / name, home / "my-lora" / name)
    (home / "chat.json").write_text(_CHAT_REQUEST)
    (home / "data.jsonl").write_text(_DATA)
    return home


def _find_port(shown: int, *, width: int) -> int:
    """Return a free port, another for each width, that ends as ``shown`` does: it may be cut."""
    first = WIDTHS.index(width)
    for port in range(shown + 10_000 * first, 1 << 16, 10_000 * len(WIDTHS)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"every port that ends as {shown} does is taken")


def normalise(text: str) -> str:
    """Replace what differs from run to run."""
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def main() -> None:
    """Write the transcripts."""
    TRANSCRIPTS.mkdir(exist_ok=True)
    for width in WIDTHS:
        (TRANSCRIPTS / f"first-hour-{width}.txt").write_text(record(width=width), encoding="utf-8")


if __name__ == "__main__":
    main()
