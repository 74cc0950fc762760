"""Our registry server against Debian's docker-registry, and ``install`` against ``oras pull``.

Both servers keep files on the same disk and serve the same client over loopback: blobs through
``http.client``, which adds little time of its own, manifests through ``ab``, which keeps eight
connections busy. Ours checks a token, permissions, limits and quota on every request and logs it;
the rival runs without these.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import Row, Run, compare, judge, main, make_absent_row, time_action
from benchmarks.inputs import write_lora, write_package
from benchmarks.registry_servers import (
    DOCKER_REGISTRY,
    EXPERTCTL,
    RegistryServer,
    run_docker_registry,
    run_our_server,
)
from expertctl.trust.keys import PrivateKey

BLOB_BYTES = 256 << 20
BIG_BYTES = 1 << 30
CHUNK = 1 << 20
REQUESTS = 3000
CONNECTIONS = 8
PACKAGES = 50
RANK = 2
"""Makes packages of 5 MB."""
MAX_SERVER_BYTES = 200_000_000
RIVAL = "docker-registry 2.8"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

ORAS_PULL = """
import json, sys
from oras.client import OrasClient
host, token, targets = json.loads(sys.argv[1])
client = OrasClient(hostname=host, insecure=True, auth_backend="basic")
client.login(hostname=host, username="admin", password=token)
for target, folder in targets.items():
    client.pull(target=target, outdir=folder)
"""


def measure(rounds: int) -> Sequence[Row]:
    """Compare the two servers, then the two clients on ours."""
    if DOCKER_REGISTRY is None or shutil.which("ab") is None:
        install = "apt-get install docker-registry apache2-utils"
        return [make_absent_row("all", rival=RIVAL, install=install, target=">= 1.0")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            run_our_server(folder / "ours") as ours,
            run_docker_registry(folder / "theirs") as theirs,
        ):
            _create_namespace(ours, "bench", kind="oci")
            rows = [
                _compare_blob_get(ours, theirs, rounds),
                _compare_blob_put(ours, theirs, rounds),
                _compare_manifest_get(ours, theirs, rounds),
            ]
        with run_our_server(folder / "memory") as ours:
            _create_namespace(ours, "bench", kind="oci")
            rows.append(_measure_memory(ours))
        with run_our_server(folder / "install") as ours:
            rows += _compare_install(ours, folder, rounds=min(rounds, 3))
    return rows


def _compare_blob_get(ours: RegistryServer, theirs: RegistryServer, rounds: int) -> Row:
    data = np.random.default_rng(0).bytes(BLOB_BYTES)
    runs = []
    for server in (ours, theirs):
        digest = _put_blob(server, "bench/get", data)
        runs.append(_make_get_run(server, f"/v2/bench/get/blobs/{digest}"))
    row = compare("blob GET, 256 MiB", *runs, rival=RIVAL, rounds=rounds)
    return _to_rate_row(row, BLOB_BYTES / 1e6, "MB/s", ">= 1.0")


def _compare_blob_put(ours: RegistryServer, theirs: RegistryServer, rounds: int) -> Row:
    runs = [_make_put_run(server, BLOB_BYTES) for server in (ours, theirs)]
    row = compare("blob PUT, 256 MiB", *runs, rival=RIVAL, rounds=rounds)
    return _to_rate_row(row, BLOB_BYTES / 1e6, "MB/s", ">= 1.0")


def _compare_manifest_get(ours: RegistryServer, theirs: RegistryServer, rounds: int) -> Row:
    runs = []
    for server in (ours, theirs):
        digest = _put_manifest(server, "bench/manifest")
        runs.append(_make_request_run(server, f"/v2/bench/manifest/manifests/{digest}"))
    row = compare("manifest GET by digest", *runs, rival=RIVAL, rounds=rounds)
    return _to_rate_row(row, REQUESTS, "requests/s", ">= 0.5")


def _measure_memory(server: RegistryServer) -> Row:
    """The maximum memory of all processes of the server while it receives 1 GiB."""
    with _PeakMemorySampler(server.process.pid) as peak:
        _make_put_run(server, BIG_BYTES)()
    row = Row(
        "server memory, upload of 1 GiB",
        ours=round(peak[0] / 1e6, 1),
        rival="the limit",
        theirs=MAX_SERVER_BYTES / 1e6,
        unit="MB",
        better="lower",
        ratio=round(peak[0] / MAX_SERVER_BYTES, 3),
        spread=None,
    )
    return judge(row, "<= 1.0")


def _compare_install(server: RegistryServer, folder: Path, *, rounds: int) -> list[Row]:
    """One ``install`` of 50 packages into a new home, against 50 pulls.

    The rival's package has no command: a pull is a process that calls its library. The second row
    excludes the start of 49 of these processes.
    """
    home = folder / "publisher"
    references = _publish_packages(server, folder, home)
    targets = [f"{server.host}/{ref.replace('@', ':')}" for ref in references]
    ours = time_action(lambda: _install_all(server, folder / "home", home, references))
    case = f"install of {PACKAGES} packages of 5 MB, cold"
    commands = compare(
        case,
        ours,
        time_action(lambda: _pull_all(server, folder / "pulled", targets, at_once=1)),
        rival="oras pull, one after another",
        rounds=rounds,
    )
    loop = compare(
        case,
        ours,
        time_action(lambda: _pull_all(server, folder / "pulled", targets, at_once=PACKAGES)),
        rival="oras pull in a loop, one process",
        rounds=rounds,
    )
    return [
        _to_rate_row(commands, PACKAGES, "packages/s", ">= 2.0"),
        _to_rate_row(loop, PACKAGES, "packages/s", None),
    ]


def _make_get_run(server: RegistryServer, path: str) -> Run:
    buffer = bytearray(CHUNK)

    def get() -> None:
        connection = http.client.HTTPConnection(server.host)
        connection.request("GET", path, headers=server.headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        size = 0
        while count := answer.readinto(buffer):
            size += count
        assert size == BLOB_BYTES, size
        connection.close()

    return time_action(get)


def _make_put_run(server: RegistryServer, size: int) -> Run:
    """Upload a blob that is new every time: one MiB that changes, repeated."""
    rng = np.random.default_rng(os.getpid())
    count = size // CHUNK

    def run() -> float:
        piece = rng.bytes(CHUNK)
        hasher = hashlib.sha256()
        for _ in range(count):
            hasher.update(piece)
        digest = f"sha256:{hasher.hexdigest()}"
        pieces = (piece for _ in range(count))
        return time_action(lambda: _send_blob(server, "bench/put", pieces, size, digest))()

    return run


def _make_request_run(server: RegistryServer, path: str) -> Run:
    """Send the same request over several connections that stay open."""
    headers = [f"{k}: {v}" for k, v in {**server.headers, "Accept": MANIFEST_TYPE}.items()]
    words = [word for header in headers for word in ("-H", header)]
    counts = ["-n", str(REQUESTS), "-c", str(CONNECTIONS)]
    command = ["ab", "-q", "-k", *counts, *words, f"{server.url}{path}"]

    def run() -> float:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        failed = re.search(r"^Failed requests: +(\d+)", output, re.MULTILINE)
        assert failed is not None, output
        assert failed[1] == "0", output
        assert "Non-2xx" not in output, output
        taken = re.search(r"^Time taken for tests: +([\d.]+)", output, re.MULTILINE)
        assert taken, output
        return float(taken[1])

    return run


def _put_blob(server: RegistryServer, repository: str, data: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    view = memoryview(data)
    pieces = (bytes(view[i : i + CHUNK]) for i in range(0, len(data), CHUNK))
    _send_blob(server, repository, pieces, len(data), digest)
    return digest


def _send_blob(
    server: RegistryServer, repository: str, pieces: Iterator[bytes], size: int, digest: str
) -> None:
    begun = _request(server, "POST", f"/v2/{repository}/blobs/uploads/", status=202)
    location = begun.headers["Location"].removeprefix(server.url)
    mark = "&" if "?" in location else "?"
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    _request(server, "PUT", f"{location}{mark}digest={digest}", pieces, headers, status=201)


def _put_manifest(server: RegistryServer, repository: str) -> str:
    config, layer = _put_blob(server, repository, b"{}"), _put_blob(server, repository, b"layer")
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": EMPTY_TYPE, "digest": config, "size": 2},
        "layers": [{"mediaType": "application/octet-stream", "digest": layer, "size": 5}],
    }
    data = json.dumps(manifest).encode()
    headers = {"Content-Type": MANIFEST_TYPE}
    _request(server, "PUT", f"/v2/{repository}/manifests/1", data, headers, status=201)
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _request(
    server: RegistryServer,
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None = None,
    headers: dict[str, str] | None = None,
    *,
    status: int,
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.host)
    connection.request(method, path, body, {**server.headers, **(headers or {})})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == status, (method, path, answer.status, content[:300])
    connection.close()
    return answer


def _create_namespace(server: RegistryServer, name: str, *, kind: str) -> None:
    body = json.dumps({"name": name, "kind": kind}).encode()
    headers = {"Content-Type": "application/json"}
    _request(server, "POST", "/api/v1/namespaces", body, headers, status=201)


class _PeakMemorySampler:
    """Samples the memory of a process and its children; the first item is the peak in bytes.

    Pages that several of them share count once (PSS).
    """

    def __init__(self, pid: int) -> None:
        """Watch the tree of one process."""
        self._process = psutil.Process(pid)
        self._peak = [0]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> list[int]:
        """Begin to sample."""
        self._thread.start()
        return self._peak

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            tree = [self._process, *self._process.children(recursive=True)]
            held = sum(process.memory_full_info().pss for process in tree)
            self._peak[0] = max(self._peak[0], held)


def _publish_packages(server: RegistryServer, folder: Path, home: Path) -> list[str]:
    """Publish packages of about 5 MB with different weights; return their references."""
    key = PrivateKey.generate("ecdsa-p256")
    files = []
    for number in range(PACKAGES):
        source = write_lora(folder / f"adapter-{number}", seed=number, rank=RANK)
        files.append(folder / f"p{number}.expert")
        write_package(source, files[-1], name=f"bench/p{number}", key=key)
        shutil.rmtree(source)
    _create_namespace(server, "bench", kind="expert")
    pem = json.dumps({"public_key": key.public.pem().decode(), "statement": None}).encode()
    headers = {"Content-Type": "application/json"}
    _request(server, "POST", "/api/v1/namespaces/bench/keys", pem, headers, status=200)
    _prepare_home(server, home)
    _expertctl(["trust", "add", str(_write_file(folder / "bench.pem", key.public.pem())),
                "--namespace", "bench"], server, home)  # fmt: skip
    _expertctl(["publish", *map(str, files)], server, home)
    return [f"bench/p{number}@1.0.0" for number in range(PACKAGES)]


def _prepare_home(server: RegistryServer, home: Path) -> None:
    """Trust the registry in the way that `registry init` describes."""
    registry = json.loads(_request_body(server, "/api/v1/"))
    fingerprint = registry["index_key"]["key_id"]
    _expertctl(["trust", "registry", "add", server.url, "--fingerprint", fingerprint], server, home)


def _install_all(server: RegistryServer, home: Path, like: Path, references: list[str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    shutil.copy(like / "trust.json", home / "trust.json")
    _expertctl(["install", "--json", *references], server, home)


def _pull_all(server: RegistryServer, folder: Path, targets: list[str], *, at_once: int) -> None:
    """Pull everything, with one process for every few packages."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {**os.environ, "HOME": str(folder)}
    folders = {target: str(folder / str(number)) for number, target in enumerate(targets)}
    for start in range(0, len(targets), at_once):
        part = {target: folders[target] for target in targets[start : start + at_once]}
        words = json.dumps([server.host, server.token, part])
        command = [sys.executable, "-c", ORAS_PULL, words]
        subprocess.run(command, check=True, capture_output=True, env=environment)
    assert all(any(Path(pulled).iterdir()) for pulled in folders.values())


def _expertctl(words: list[str], server: RegistryServer, home: Path) -> None:
    environment = {
        **os.environ,
        "EXPERT_HOME": str(home),
        "EXPERT_REGISTRY": server.url,
        "EXPERT_TOKEN": server.token or "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([EXPERTCTL, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def _request_body(server: RegistryServer, path: str) -> bytes:
    connection = http.client.HTTPConnection(server.host)
    connection.request("GET", path, headers=server.headers)
    return connection.getresponse().read()


def _write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _to_rate_row(row: Row, amount: float, unit: str, target: str | None) -> Row:
    """Convert milliseconds for an amount of data into a rate, where higher is better."""
    assert row.ours is not None
    assert row.theirs is not None
    assert row.ratio is not None
    assert row.spread is not None
    rates = [round(amount / value * 1000, 1) for value in (row.ours, row.theirs)]
    low, high = (round(1 / value, 3) for value in reversed(row.spread))
    better = replace(
        row, ours=rates[0], theirs=rates[1], unit=unit, better="higher",
        ratio=round(1 / row.ratio, 3), spread=(low, high),
    )  # fmt: skip
    return judge(better, target) if target else better


if __name__ == "__main__":
    main("registry", measure, rounds=7)
