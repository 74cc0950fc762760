"""Clients for Python that are in no extra: LiteLLM and ``llm``, in an environment of their own.

It is made for this test and holds nothing of ours; the suite is in ``python/``.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertctl.server.api_keys import ApiKeyStore
from tests.server.openai.scripted_base import HELLO, make_scripted_packages
from tests.server.server_process import run_socket_server

SUITE = Path(__file__).parent / "python"
SECONDS = 900

pytestmark = pytest.mark.all


def test_the_suite_of_other_clients_for_python_passes(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([python, *install, "-r", SUITE / "requirements.txt"], check=True)
    user_home = make_scripted_packages(tmp_path / "stock").make_home(tmp_path / "home")
    secret = ApiKeyStore(user_home.home.api_keys).create("other", now=time.time()).secret
    (tmp_path / "llm").mkdir()
    with run_socket_server(user_home, tmp_path / "log", "--alias", "gpt-4o-mini=tiny") as server:
        told = {
            "EXPERT_TEST_URL": server.base_url,
            "EXPERT_TEST_KEY": secret,
            "EXPERT_TEST_HELLO": "".join(HELLO),
            "LLM_USER_PATH": str(tmp_path / "llm"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        done = subprocess.run(
            [python, SUITE / "suite.py"],
            cwd=tmp_path,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
