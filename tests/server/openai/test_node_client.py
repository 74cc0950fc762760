"""Clients for JavaScript, each on a server of its own.

The suite of the official one is in ``node/``, that of the Vercel AI SDK in ``vercel/``.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from expertctl.server.api_keys import ApiKeyStore
from tests.server.openai.scripted_base import HELLO, make_scripted_packages
from tests.server.server_process import run_socket_server

SUITES = Path(__file__).parent

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm"),
]


@pytest.mark.parametrize("name", ["node", "vercel"])
def test_the_suite_of_a_client_for_javascript_passes(tmp_path: Path, name: str) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(SUITES / name, suite, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=suite, check=True)
    user_home = make_scripted_packages(tmp_path / "stock").make_home(tmp_path / "home")
    secret = ApiKeyStore(user_home.home.api_keys).create("node", now=time.time()).secret
    with run_socket_server(user_home, tmp_path / "log") as server:
        told = {
            "EXPERT_TEST_URL": server.base_url,
            "EXPERT_TEST_KEY": secret,
            "EXPERT_TEST_HELLO": "".join(HELLO),
        }
        done = subprocess.run(
            ["node", "--test"],
            cwd=suite,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
