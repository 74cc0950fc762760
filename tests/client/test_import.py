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
        "import expertctl.client\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "ours = sorted(n for n in sys.modules if n.split('.')[0] == 'expertctl')\n"
        "others = [n for n in ours if not n.startswith('expertctl.client')]\n"
        "print(heavy, others)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] ['expertctl', 'expertctl.errors']"


@pytest.mark.parametrize("path", sorted(CLIENT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_of_ours_only_the_errors(path: Path) -> None:
    ours = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("expertctl")
    }
    allowed = {"expertctl", "expertctl.errors"}
    assert {name for name in ours if not name.startswith("expertctl.client")} <= allowed
