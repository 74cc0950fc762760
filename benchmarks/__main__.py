"""Run benchmarks, all or those named, one at a time, each in its own process; print tables."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import format_table

HELPER_MODULES = {
    *("cache_policies", "harness", "injections", "inputs", "random_rows"),
}
ENGINE_MODULES = {
    *("comparison", "engine_process", "engines", "expert_engines", "gguf", "oracle", "small_llama"),
}
HOME_MODULES = {"routing_home", "served_home"}
SERVER_MODULES = {"registry_servers", "serving_load"}
NOT_BENCHMARKS = {
    "__init__",
    "__main__",
    *HELPER_MODULES,
    *ENGINE_MODULES,
    *HOME_MODULES,
    *SERVER_MODULES,
}


def benchmark_names() -> list[str]:
    """Return the names of the benchmark modules, sorted."""
    names = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return sorted(names - NOT_BENCHMARKS)


def main() -> None:
    """Print one table per benchmark; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    names = benchmark_names()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}")
    wanted = parser.parse_args().names
    if unknown := sorted({*wanted} - {*names}):
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    missed = False
    for name in wanted or names:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
        output = subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout
        document = json.loads(output)  # also of one that exits 1 for what it found
        missed |= any(row["ok"] is False for row in document["rows"])
        print(format_table(document), flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
