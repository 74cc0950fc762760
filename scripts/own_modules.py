"""Count the project modules that a warm ``expertctl run`` imports, and its stack depth.

``python -m scripts.own_modules [--json]`` runs the starter base twice in an empty ``EXPERT_HOME``:
once to install it and to compile its kernels, once measured. It prints the number of modules of
``expertctl`` that the second run imported, and the largest number of stack frames of ``expertctl``
while its first token after the prompt was computed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PROMPT = "Sort these numbers: 41, 17, 23, 15"
MARK = "own-modules: "


class DepthProfiler:
    """Watches the first call of one function and counts the project's stack frames in it."""

    def __init__(self, code: CodeType, root: str) -> None:
        """Count frames of files under ``root`` while ``code`` runs for the first time."""
        self._code, self._root = code, root
        self._entered: FrameType | None = None
        self.depth = 0
        self.done = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Handle one event of `sys.setprofile`."""
        if self.done:
            return
        if event == "call" and self._entered is None and frame.f_code is self._code:
            self._entered = frame
        if self._entered is None:
            return
        if event == "call":
            self.depth = max(self.depth, self._count_frames(frame))
        elif event == "return" and frame is self._entered:
            self.done = True

    def _count_frames(self, frame: FrameType | None) -> int:
        count = 0
        while frame is not None:
            count += frame.f_code.co_filename.startswith(self._root)
            frame = frame.f_back
        return count


def run_measured() -> None:
    """Run one prompt in this process and print both counts as JSON after a marker."""
    import expertctl
    from expertctl.cli import app

    root = str(Path(expertctl.__file__).parent)
    # The command imports the engine only when it needs it, so the profiler finds it by its name.
    profiler: DepthProfiler | None = None

    def start(frame: FrameType, event: str, value: Any) -> None:
        nonlocal profiler
        if profiler is None:
            code = frame.f_code
            if event != "call" or code.co_qualname != "RunningBatch.run_decode":
                return
            profiler = DepthProfiler(code, root)
        profiler(frame, event, value)
        if profiler.done:
            sys.setprofile(None)

    threading.setprofile(start)
    sys.setprofile(start)
    code = app.run(["run", PROMPT])
    sys.setprofile(None)
    threading.setprofile(None)
    assert code == 0, f"the run ended with {code}"
    assert profiler is not None, "nothing was decoded"
    modules = [name for name in sys.modules if name.split(".")[0] == "expertctl"]
    print(MARK + json.dumps({"modules": len(modules), "frames": profiler.depth}))


def measure() -> dict[str, int]:
    """Run the prompt in two new processes; return the counts of the second one."""
    with tempfile.TemporaryDirectory() as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_")}
        environment["EXPERT_HOME"] = home
        command = [sys.executable, "-m", "scripts.own_modules", "--in-process"]
        for _ in range(2):
            done = subprocess.run(  # noqa: S603  # our own module
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return dict(json.loads(line.removeprefix(MARK)))


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        run_measured()
        return
    found = measure()
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['modules']} modules of expertctl loaded by a warm run")
        print(
            f"{found['frames']} frames of expertctl on the deepest stack of the first decode step"
        )


if __name__ == "__main__":
    main()
