"""Logging in to a real server, as its clients do: over sockets, through granian."""

import http.client
import json
import os
import re
import sqlite3
from base64 import b64encode
from contextlib import closing
from pathlib import Path

import pytest

from registry_server.operation.new_registry import create_admin_token
from registry_server.settings import RegistryLimits
from tests.registry_server.operation.server_process import (
    ServerProcess,
    init_registry_folder,
    run_server,
)

pytestmark = pytest.mark.all


def ask(
    server: ServerProcess, path: str, *authorizations: str
) -> tuple[int, dict[str, str], object]:
    """Send a request by hand, with as many Authorization headers as are given."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
        client.putrequest("GET", path)
        for value in authorizations:
            client.putheader("AUTHORIZATION", value)
        client.endheaders()
        answer = client.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        realms = [v for n, v in answer.getheaders() if n.lower() == "www-authenticate"]
        return answer.status, headers | {"realms": "\n".join(realms)}, json.loads(answer.read())


def test_the_login_of_a_container_client(tmp_path: Path) -> None:
    """A 401 names the token endpoint; a session from there outlives a restart of the server."""
    made = init_registry_folder(tmp_path / "registry")
    basic = f"Basic {b64encode(f'anything:{made.token}'.encode()).decode()}"
    with run_server(made.settings.data) as server:
        status, headers, _ = ask(server, "/v2/")
        assert status == 401
        realm = re.search(r'realm="(http://[^"]*)"', headers["realms"])
        assert realm is not None
        assert realm.group(1) == f"http://127.0.0.1:{server.port}/token"
        status, _, session = ask(server, "/token?scope=repository:acme/sql:pull", basic)
        assert status == 200
        assert isinstance(session, dict)
        bearer = f"Bearer {session['token']}"
        assert ask(server, "/v2/", bearer)[0] == 200
        assert ask(server, "/v2/", basic)[0] == 200
        assert ask(server, "/v2/", basic, bearer)[0] == 401
        assert server.stop() == 0
    with run_server(made.settings.data) as server:
        assert ask(server, "/v2/", bearer)[0] == 200
        assert ask(server, "/v2/", bearer[:-4] + "AAAA")[0] == 401


def test_attack_80_guessing_over_sockets(tmp_path: Path) -> None:
    made = init_registry_folder(tmp_path / "registry", limits=RegistryLimits(failures_per_minute=4))
    with run_server(made.settings.data) as server:
        guesses = [ask(server, "/v2/", f"Bearer xpt_{n:043}")[0] for n in range(4)]
        assert guesses == [401] * 4
        for n in range(4, 60):  # a slow machine earns further guesses, one in fifteen seconds
            status, headers, _ = ask(server, "/v2/", f"Bearer xpt_{n:043}")
            if status == 429:
                break
        assert status == 429
        assert 0 < int(headers["retry-after"]) <= 15
        assert ask(server, "/v2/", f"Bearer {made.token}")[0] == 200
        _, _, page = ask(server, "/api/v1/audit", f"Bearer {made.token}")
        assert isinstance(page, dict)
        (refused,) = [e for e in page["entries"] if e["action"] == "login.refused"]
        assert (refused["address"], refused["target"]) == ("127.0.0.1", "xpt_00000000")
        assert server.stop() == 0
    logged = server.log.read_text()
    assert "xpt_" not in logged.replace("xpt_***", "")
    assert made.token not in logged


def test_what_the_command_line_changes_beside_a_running_server_holds_at_once(
    tmp_path: Path,
) -> None:
    """A new admin token is written by another process, and is good for the next request."""
    made = init_registry_folder(tmp_path / "registry")
    with run_server(made.settings.data) as server:
        assert ask(server, "/api/v1/whoami", f"Bearer {made.token}")[0] == 200
        second = create_admin_token(made.settings.data)
        assert ask(server, "/api/v1/whoami", f"Bearer {second}")[0] == 200
        assert server.stop() == 0


def test_uploads_that_nobody_continues_are_gone_without_a_new_one(tmp_path: Path) -> None:
    """The time of the upload is set back while the server rests; its start sweeps."""
    made = init_registry_folder(tmp_path / "registry")
    token = f"Bearer {made.token}"
    with run_server(made.settings.data) as server:
        headers = {"Authorization": token, "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
            client.request("POST", "/api/v1/namespaces", '{"name":"acme","kind":"oci"}', headers)
            assert client.getresponse().status == 201
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
            client.request("POST", "/v2/acme/x/blobs/uploads/", headers=headers)
            answer = client.getresponse()
            location = answer.headers["Location"]
            assert answer.status == 202
        assert server.stop() == 0
    day = made.settings.limits.upload_seconds
    with closing(sqlite3.connect(made.settings.database)) as database, database:
        database.execute("UPDATE uploads SET updated = updated - ?", (day + 1,))
    for file in made.settings.uploads.iterdir():
        os.utime(file, (0, 0))
    with run_server(made.settings.data) as server:
        assert list(made.settings.uploads.iterdir()) == []
        assert ask(server, location, token)[0] == 404
