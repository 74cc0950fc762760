"""The check of a GPU machine in six minutes: tests, numerics, speed; one page of text.

Each part is a process with a time limit, so a part that fails or hangs does not affect the others.
Only the standard library is used here: the measurements are in `benchmarks.gpu.parts`, which may
run in an environment made from carried packages. Exit codes: 0 for success, 1 when a test or a part
failed or a target is missed, 2 for a usage error, 3 without a CUDA device.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.packages import (
    PYTHON_VERSION,
    ROOT,
    PackagesError,
    create_environment,
    download_packages,
)
from benchmarks.harness import format_table

OK, FAILED, NO_DEVICE = 0, 1, 3
"""Exit codes; argparse exits with 2."""
TOTAL_SECONDS = 360
"""Time limit of the whole check."""
MACHINE_SECONDS = 60
"""Time limit of the process that describes the machine."""
PART_SECONDS = {"tests": 140, "numerics": 30, "qwen3-0.6b": 50, "qwen3-4b": 75, "routed": 75}
"""Time limit of each part; a part that starts late has the rest of the total."""
REHEARSAL_SLACK = 4
"""How many times longer a rehearsal may take: other work may keep a processor busy."""
_MIN_SECONDS = 5
"""With less time than this a part is not started."""
_LOG_LINES, _FAILED_TESTS = 12, 10
"""Lines of output of a failed part, and number of failed tests, that a page shows."""
_GPU_MARK = "pytest.mark.gpu"


JsonRows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PartResult:
    """The outcome of a part; its rows are those of `benchmarks.harness`, in their JSON form."""

    name: str
    limit: float
    """Maximum seconds that it might take."""
    outcome: str
    is_ok: bool
    seconds: float = 0.0
    rows: JsonRows = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """The last lines of its output, and the tests that failed, if it failed."""


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One run of the check: the interpreter and output folder of the parts, and its start time."""

    python: Path
    folder: Path
    started: float
    """Time of `time.monotonic` at the start of the whole check."""
    is_rehearsal: bool

    @property
    def deadline(self) -> float:
        """Time of `time.monotonic` at which the whole check must end."""
        return self.started + find_limit("total", is_rehearsal=self.is_rehearsal)

    def run_part(self, name: str) -> PartResult:
        """Run a part within its limit."""
        limit = find_limit(name, is_rehearsal=self.is_rehearsal)
        left = self.deadline - time.monotonic()
        if left < _MIN_SECONDS:
            return PartResult(name, limit, "not started: no time was left", is_ok=False)
        report = self.folder / f"{name}.report"
        started = time.monotonic()
        status, log = self.run_process(self._make_command(name, report), min(limit, left))
        seconds = round(time.monotonic() - started, 1)
        outcome, is_ok, rows = self._judge(name, report, status)
        if name == "tests" and report.exists():
            log = read_failures(report) or log
        return PartResult(name, limit, outcome, is_ok, seconds, rows, [] if is_ok else log)

    def _judge(self, name: str, report: Path, status: int | None) -> tuple[str, bool, JsonRows]:
        """Return the outcome of a part, whether it passed, and its rows."""
        if status is None:
            return "stopped at its limit", False, []
        if name == "tests" and report.exists():
            counts = count_tests(report)
            outcome = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            # where there is a device, it is a failure, too, when no test ran
            return outcome, status == 0 and (self.is_rehearsal or bool(counts["passed"])), []
        if status:
            return f"failed with status {status}", False, []
        rows: JsonRows = json.loads(report.read_text(encoding="utf-8"))
        missed = sum(row["ok"] is False for row in rows)
        outcome = f"{missed} of {len(rows)} missed" if missed else "done"
        return outcome, not missed, rows

    def describe_machine(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Describe the machine of the parts; return None and the log if that fails."""
        report = self.folder / "machine.report"
        status, log = self.run_process(self._make_command("machine", report), MACHINE_SECONDS)
        if status != 0:
            return None, log
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found | {"driver": None if self.is_rehearsal else read_driver_version()}, log

    def run_process(self, command: Sequence[str], limit: float) -> tuple[int | None, list[str]]:
        """Run a process and its children; return its status and its last lines.

        The status is None if it was killed at its limit, in seconds.
        """
        with TemporaryDirectory(dir=self.folder) as folder:
            log = Path(folder) / "log"
            with log.open("wb") as stream:
                status = _run_group(command, stream.fileno(), limit, self._make_environment())
            text = log.read_text(encoding="utf-8", errors="replace")
        return status, text.strip().splitlines()[-_LOG_LINES:]

    def _make_command(self, name: str, report: Path) -> list[str]:
        if name != "tests":
            command = [str(self.python), "-m", "benchmarks.gpu.parts", name, str(report)]
            return [*command, "--rehearse"] if self.is_rehearsal else command
        words = ("-m", "pytest", "-q", "--tb=line", "-m", "gpu", f"--junitxml={report}")
        return [str(self.python), *words, *map(str, find_gpu_tests(ROOT / "tests"))]

    def _make_environment(self) -> dict[str, str]:
        """Return the environment of a part: without downloads and third-party plugins."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return found | {"CUDA_VISIBLE_DEVICES": ""} if self.is_rehearsal else found


def _run_group(
    command: Sequence[str], output: int, limit: float, environment: Mapping[str, str]
) -> int | None:
    """Run a process in its own group, which ends with it; None if it was killed."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_limit(name: str, *, is_rehearsal: bool) -> float:
    """Return the limit of a part, or of the ``total``, in seconds."""
    seconds = TOTAL_SECONDS if name == "total" else PART_SECONDS[name]
    return float(seconds * (REHEARSAL_SLACK if is_rehearsal else 1))


def find_gpu_tests(folder: Path) -> list[Path]:
    """Return the files with tests that are marked ``gpu``; others need other packages."""
    paths = sorted(folder.rglob("test_*.py"))
    return [path for path in paths if _GPU_MARK in path.read_text(encoding="utf-8")]


def count_tests(report: Path) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    cases = list(_read_cases(report))
    failed = sum(_find_failure(case) is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}


def read_failures(report: Path) -> list[str]:
    """Return a line about each of the first tests that failed."""
    found = ((case, _find_failure(case)) for case in _read_cases(report))
    lines = [_describe_failure(case, failure) for case, failure in found if failure is not None]
    left = len(lines) - _FAILED_TESTS
    return [*lines[:_FAILED_TESTS], f"and {left} more"] if left > 0 else lines


def _read_cases(report: Path) -> Iterator[ElementTree.Element]:
    return ElementTree.parse(report).getroot().iter("testcase")


def _find_failure(case: ElementTree.Element) -> ElementTree.Element | None:
    return next((part for part in case if part.tag in {"failure", "error"}), None)


def _describe_failure(case: ElementTree.Element, failure: ElementTree.Element) -> str:
    message = " ".join(failure.get("message", "").split())
    return f"{case.get('classname')}::{case.get('name')}: {message}"


def read_driver_version() -> str | None:
    """Return the version of the NVIDIA driver, if its tool reports one."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:  # the driver hangs
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def make_document(
    machine: Mapping[str, Any], results: Sequence[PartResult], *, seconds: float, rehearsal: bool
) -> dict[str, Any]:
    """Return the document of ``--json``."""
    return {
        "name": "gpu_check",
        "machine": dict(machine),
        "rehearsal": rehearsal,
        "seconds": round(seconds, 1),
        "ok": all(result.is_ok for result in results),
        "parts": [asdict(result) for result in results],
    }


def format_page(document: Mapping[str, Any]) -> str:
    """Return a document as a page of text."""
    rows = [row for part in document["parts"] for row in part["rows"]]
    about = "little bases on the processor" if document["rehearsal"] else "medians"
    table = format_table({"name": "Figures:", "machine": about, "rows": rows})
    return "\n".join(
        [
            *_format_head(document),
            "",
            *(_format_part(part) for part in document["parts"]),
            "",
            table,
            "",
            *_format_result(document),
        ]
    )


def _format_head(document: Mapping[str, Any]) -> Iterator[str]:
    machine, seconds = document["machine"], document["seconds"]
    software = f"torch {machine['torch']}, Python {machine['python']}"
    if document["rehearsal"]:
        yield f"GPU check, rehearsed on the processor: expertctl {machine['expertctl']}, {software}"
        yield "Speed means nothing here and is not judged; tests that need a device are skipped."
    else:
        memory, driver = machine["memory"] / 1e9, machine["driver"] or "unknown"
        yield f"GPU check: {machine['device']}, {memory:.0f} GB, driver {driver}"
        yield f"expertctl {machine['expertctl']}, {software}, CUDA {machine['cuda']}"
    limit = find_limit("total", is_rehearsal=document["rehearsal"])
    yield f"{seconds:.0f} s of {limit:.0f} s"


def _format_part(part: Mapping[str, Any]) -> str:
    return (
        f"{part['name']:12}{part['seconds']:7.1f} s of {part['limit']:3.0f} s   {part['outcome']}"
    )


def _format_result(document: Mapping[str, Any]) -> Iterator[str]:
    for part in document["parts"]:
        for row in part["rows"]:
            if row["ok"] is False:
                yield f"missed: {row['case']}: {row['ratio']}, target {row['target']}"
        if part["log"]:
            yield f"{part['name']}: {part['outcome']}"
            yield from (f"  {line[:160]}" for line in part["log"])
    yield "result: ok" if document["ok"] else "result: not ok"


def check_machine(run: CheckRun, names: Sequence[str], json_file: Path | None) -> int:
    """Run parts, print the page and write the document after each part; return the exit code."""
    machine, log = run.describe_machine()
    if machine is None:
        _print_error("the packages that the check needs cannot be imported:", *log)
        return FAILED
    if machine["device"] is None and not run.is_rehearsal:
        _print_error(
            f"torch {machine['torch']} sees no CUDA device on this machine",
            "",
            "hint: to run every part on the processor with little bases, add --rehearse",
        )
        return NO_DEVICE
    results: list[PartResult] = []
    document: dict[str, Any] = {}
    for name in names:
        results.append(run.run_part(name))
        seconds = time.monotonic() - run.started
        document = make_document(machine, results, seconds=seconds, rehearsal=run.is_rehearsal)
        print(_format_part(document["parts"][-1]), file=sys.stderr, flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(format_page(document), flush=True)
    return OK if document["ok"] else FAILED


def _print_error(*lines: str) -> None:
    print("error: " + "\n".join(lines), file=sys.stderr)


def prepare_packages(folder: Path) -> int:
    """Download what a GPU machine lacks; return the exit code."""
    wheels = download_packages(folder)
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{folder}: {len(wheels)} wheels for Python {PYTHON_VERSION}, {size:.1f} MiB")
    return OK


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Check a machine with a GPU in six minutes: tests, numerics and speed.",
        epilog="exit codes: 0 all is well, 1 something failed or a target is missed, "
        "2 wrong usage, 3 no CUDA device",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prepare",
        type=Path,
        metavar="DIR",
        help="only download what a GPU machine lacks; wheels in DIR are replaced",
    )
    source.add_argument(
        "--packages", type=Path, metavar="DIR", help="install what --prepare downloaded, and use it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--only", action="append", choices=PART_SECONDS, help="run only this part")
    parser.add_argument(
        "--rehearse", action="store_true", help="run every part on the processor, with little bases"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Check the machine, or prepare packages; return the exit code."""
    options, started = parse_arguments(words), time.monotonic()
    try:
        if options.prepare is not None:
            return prepare_packages(options.prepare)
        with TemporaryDirectory(prefix="gpu-check-") as name:
            folder, python = Path(name), Path(sys.executable)
            if options.packages is not None:
                python = create_environment(options.packages, folder / "environment")
            run = CheckRun(python, folder, started, options.rehearse)
            chosen = [part for part in PART_SECONDS if part in (options.only or PART_SECONDS)]
            return check_machine(run, chosen, options.json)
    except PackagesError as error:
        _print_error(str(error))
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
