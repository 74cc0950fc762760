"""What importing the client brings: nothing of the engine, and nothing else of ours."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "expertctl" / "client"
HEAVY = {"torch", "numpy", "numba", "tokenizers", "safetensors", "sqlite_utils", "jsonschema_rs"}


def test_neither_torch_nor_numpy_is_imported() -> None:
    program = (
        "import sys\n"
        "from expertctl.client import AsyncExpertClient, ExpertClient, InferResult\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "ours = sorted(n for n in sys.modules if n.split('.')[0] == 'expertctl')\n"
        "others = [n for n in ours if not n.startswith('expertctl.client')]\n"
        "print(heavy, others)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] ['expertctl', 'expertctl.errors']"


def test_results_are_imported_without_http() -> None:
    program = (
        "import sys\n"
        "from expertctl.client.result import RunAnswer\n"
        "from expertctl.client import Job, __all__ as names\n"
        "print('httpx2' in sys.modules, RunAnswer.__name__, Job.__name__)\n"
        "import expertctl.client\n"
        "print(all(getattr(expertctl.client, name) for name in names))\n"
        "print(hasattr(expertctl.client, 'Nobody'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "RunAnswer", "Job", "True", "False"]


@pytest.mark.parametrize("path", sorted(CLIENT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_of_ours_only_the_errors(path: Path) -> None:
    ours = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("expertctl")
    }
    allowed = {"expertctl", "expertctl.errors"}
    assert {name for name in ours if not name.startswith("expertctl.client")} <= allowed
