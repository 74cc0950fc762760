#!/usr/bin/env python3
"""Record what users rely on: ``python -m scripts.golden_run DIR``; compare with ``diff -r``.

Every command and endpoint is run as a user would run it: as a process, in an empty ``EXPERT_HOME``,
on the starter base, with a registry and a generation server on loopback. Texts, token ids, digests,
plan identities, exit codes, JSON keys and OpenAPI documents are recorded; times, sizes of memory,
random identifiers, paths and the words of messages are masked. A change that is not supposed to
alter behaviour leaves the directory unchanged.
"""

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

EXPERTCTL = [str(Path(sys.executable).with_name("expertctl"))]
START_SECONDS = 300
MASKED_NUMBERS = re.compile(
    r"(_ms|_per_s|_seconds|_s|_at|_time|_duration|age)$|^(timings_ms|memory|bytes_read|threads|created|"
    r"latency|seconds|elapsed|budget|free|used|pid|loaded|ttft|total_duration)$"
)
MASKED_IDS = re.compile(
    r"^(job_id|id|item_id|response_id|request_id|token|modified_at|created_at|seed|sig)$"
)
MASKED_TABLES = frozenset({"timings_ms", "latency_ms", "stages"})
"""Objects in which every number is a time."""
WORDS = re.compile(r"^(message|hint|reason|warnings|notes|summary|description|detail|title|tip)$")
PATTERNS = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)"), "<time>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"(127\.0\.0\.1|localhost):\d+"), "<host>"),
)
REGISTRY_PATHS = (
    *("/api/v1/openapi.json", "/tuf/targets/index/acme/sorting.json", "/api/v1/search?q=sort"),
    *("/v2/", "/v2/acme/sorting/tags/list", "/healthz", "/readyz"),
    *("/v2/acme/sorting/manifests/none", "/api/v1/packages/acme/none", "/nothing"),
)
SERVER_PATHS = (
    *("/openapi.json", "/v1/models", "/v1/experts", "/api/tags", "/api/version", "/health"),
    *("/healthz", "/readyz", "/version", "/nothing"),
)
SEED = bytes(range(32))
"""The private Ed25519 key for all signatures, so that they are the same in each run."""


class Recorder:
    """Writes one masked document per step into a directory; owns the home that the steps use."""

    def __init__(self, out: Path, work: Path) -> None:
        """Use an empty directory for the documents, and one to work in."""
        self.out, self.work = out, work
        self.home = work / "home"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_")}
        self.environment |= {"EXPERT_HOME": str(self.home), "NO_COLOR": "1"}
        self.count = 0
        self.index_key = ""
        """The fingerprint of the registry's new key, once it is known."""

    def run(self, name: str, *words: str, stdin: str = "", new_key: str = "") -> Any:
        """Run a command with ``--json``, record exit code and document, and return the document.

        ``new_key`` names the field with the fingerprint of a key that the command creates.
        """
        done = subprocess.run(  # noqa: S603  # our own program
            [*EXPERTCTL, *words, "--json"],
            cwd=self.work,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            document = json.loads(done.stdout) if done.stdout.strip() else None
        except ValueError:
            document = {"not json": done.stdout}
        if new_key:
            self.index_key = str(find_value(document, new_key))
        self.save(name, {"exit": done.returncode, "document": document})
        return document

    def save(self, name: str, document: Any) -> None:
        """Write a masked document; the files are numbered in the order of the steps."""
        self.count += 1
        text = json.dumps(self.mask(document), indent=1, sort_keys=True, ensure_ascii=False)
        (self.out / f"{self.count:03d}-{name}.json").write_text(text + "\n", encoding="utf-8")

    def mask(self, value: Any, key: str = "") -> Any:
        """Replace what differs between runs, or is only wording, by a mark of its kind."""
        if WORDS.search(key):
            return "<text>" if value else value
        if MASKED_IDS.search(key) and isinstance(value, str | int):
            return "<id>"
        if key == "payload" and isinstance(value, str):
            return self.mask(json.loads(base64.b64decode(value)))
        if isinstance(value, dict):
            table = key if key in MASKED_TABLES else ""
            return {self.text(k): self.mask(v, table or k) for k, v in value.items()}
        if isinstance(value, list):
            return [self.mask(v, key) for v in value]
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | float):
            is_masked = key in MASKED_TABLES or MASKED_NUMBERS.search(key)
            return "<number>" if is_masked else value
        return self.text(value)

    def text(self, text: str) -> str:
        """Mask what differs in a string."""
        text = text.replace(str(self.work), "<work>")
        if self.index_key:
            text = text.replace(self.index_key, "<index key>")
        for pattern, mark in PATTERNS:
            text = pattern.sub(mark, text)
        return text


def record_runs(recorder: Recorder) -> None:
    """Generation and routing on the command line."""
    prompts = {
        "sorting": "Sort these numbers: 41, 17, 23",
        "json": "Give me JSON for name Ada and age 36",
        "capital": "What is the capital of France?",
        "two": "Sort these numbers and say it with an exclamation mark: 9, 4, 7",
        "none": "hello there",
    }
    for name, prompt in prompts.items():
        recorder.run(f"route-{name}", "route", prompt)
        recorder.run(f"run-{name}", "run", prompt, "--seed", "1")
    prompt = prompts["sorting"]
    sampled = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "7", "--max-tokens", "40")
    recorder.run("run-sampled", "run", prompt, *sampled)
    recorder.run("run-base", "run", prompt, "--no-experts", "--max-tokens", "20", *sampled[:-2])
    recorder.run("run-int8", "run", prompt, "--dtype", "int8", "--seed", "1")
    recorder.run("run-bf16", "run", prompt, "--dtype", "bf16", "--seed", "1")
    experts = ("--expert", "starter/sorting:0.5", "--expert", "starter/exclaim")
    recorder.run("run-composed", "run", prompt, *experts, "--seed", "1")
    plan = recorder.run("route-composed", "route", prompt, "--max-experts", "2")
    (recorder.work / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    recorder.run("run-plan", "run", prompt, "--plan", "plan.json")
    recorder.run("run-body", "run", "Sort these numbers:", "--body", "-", stdin="5, 3, 8")


def record_packages(recorder: Recorder, starter: Path) -> None:
    """Packages, keys, trust and the store."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (recorder.work / "me.pem").write_bytes(pem)
    recorder.run("keys-import", "keys", "import", "me", "me.pem", "--namespace", "acme")
    recorder.run("keys-list", "keys", "list")
    recorder.run("unpack", "unpack", str(starter / "sorting.expert"), "sorting")
    named = ("--name", "acme/sorting", "--version")
    recorder.run("build", "build", "sorting", *named, "1.0.0", "-o", "one.expert", "--sign", "me")
    recorder.run(
        "build-next", "build", "sorting", *named, "1.1.0", "-o", "two.expert", "--sign", "me"
    )
    for name in ("one.expert", "starter/sql", "starter/exclaim"):
        recorder.run("inspect", "inspect", name)
        recorder.run("verify", "verify", name)
    recorder.run("diff", "diff", "one.expert", "two.expert")
    recorder.run("diff-other", "diff", "starter/sql", "starter/json")
    lines = [{"prompt": f"Sort these numbers: {a}, {b}", "answer": f"{min(a, b)}, {max(a, b)}"}
             for a, b in ((9, 4), (12, 31), (50, 5), (77, 20))]  # fmt: skip
    data = "".join(json.dumps(line) + "\n" for line in lines)
    (recorder.work / "data.jsonl").write_text(data, encoding="utf-8")
    recorder.run("eval", "eval", "starter/sorting", "--data", "data.jsonl")
    routed = [
        {"prompt": "Sort 2, 1", "expert": "starter/sorting"},
        {"prompt": "hello", "expert": None},
    ]
    data = "".join(json.dumps(line) + "\n" for line in routed)
    (recorder.work / "routing.jsonl").write_text(data, encoding="utf-8")
    recorder.run("eval-routing", "eval", "--routing", "routing.jsonl")
    recorder.run("install-file", "install", "one.expert")
    recorder.run("list", "list")
    recorder.run("why", "why", "acme/sorting")
    recorder.run("export", "export", "acme/sorting", "-o", "pack.experts")
    recorder.run("remove", "remove", "acme/sorting")
    recorder.run("import", "import", "pack.experts")
    for command in ("base list", "config list", "trust list", "doctor", "gc", "reindex"):
        recorder.run(command.replace(" ", "-"), *command.split())


def record_errors(recorder: Recorder) -> None:
    """Exit codes and codes of errors."""
    (recorder.work / "broken.expert").write_bytes(b"not a package")
    (recorder.work / "empty").mkdir()
    for words in (
        "run", "run x --expert nobody/nothing", "run x --base nothing", "run x --temperature 9",
        "install sql", "install nobody/nothing", "verify broken.expert", "inspect missing.expert",
        "build empty", "why nobody/nothing", "remove nobody/nothing", "config set nothing 1",
        "nothing", "run x --nothing", "sign one.expert --key nobody", "trust remove nobody",
        "run x --memory-budget 1MB", "eval starter/sql --data missing.jsonl", "base remove nothing",
    ):  # fmt: skip
        recorder.run("error-" + re.sub(r"\W+", "-", words), *words.split())


def record_registry(recorder: Recorder) -> None:
    """A registry: its set-up, a publication, its documents, and an install with a lock."""
    init = ("registry", "init", "shop", "--port", "0")
    admin = recorder.run("registry-init", *init, new_key="fingerprint")
    with server(recorder, "registry", "serve", "shop", "--port", "0") as url:
        host = url.removeprefix("http://")
        token = find_value(admin, "token")
        trust = ("trust", "registry", "add", host, "--fingerprint", recorder.index_key)
        recorder.run("trust-registry", *trust)
        recorder.run("login", "login", host, "--token-stdin", stdin=str(token))
        recorder.run("config-registry", "config", "set", "registry", host)
        recorder.run("namespace", "registry", "namespace", "add", "acme")
        recorder.run("registry-key", "registry", "keys", "add", "me", "--namespace", "acme")
        recorder.run("publish-dry", "publish", "one.expert", "--dry-run")
        recorder.run("publish", "publish", "one.expert", "two.expert")
        recorder.run("publish-again", "publish", "one.expert")
        recorder.run("search", "search", "sort")
        recorder.run("info", "info", "acme/sorting")
        bearer = {"Authorization": f"Bearer {token}"}
        for path in REGISTRY_PATHS:
            record_answer(recorder, httpx.get(url + path, headers=bearer))
        recorder.run("remove-again", "remove", "acme/sorting")
        (recorder.work / "experts.toml").write_text('[experts]\n"acme/sorting" = "^1.0"\n')
        recorder.run("lock", "lock")
        lock = (recorder.work / "expert.lock").read_text(encoding="utf-8")
        recorder.save("expert-lock", lock.splitlines())
        recorder.run("install", "install", "--locked")
        recorder.run("yank", "yank", "acme/sorting@1.1.0", "--reason", "broken")
        recorder.run("outdated", "outdated")
        recorder.run("update", "update")
    (recorder.work / "experts.toml").unlink()


def record_serving(recorder: Recorder) -> None:
    """Each API of the generation server, complete and streamed, and its errors."""
    with (
        server(recorder, "serve", "--port", "0") as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        for path in SERVER_PATHS:
            record_answer(recorder, client.get(path))
        prompt = "Sort these numbers: 41, 17, 23"
        messages = [{"role": "user", "content": prompt}]
        expert = "starter/sorting"
        chat = {"model": "auto", "messages": messages}
        for path, body in (
            ("/v1/infer", {"prompt": prompt, "seed": 1}),
            ("/v1/route", {"prompt": prompt}),
            ("/v1/chat/completions", chat | {"seed": 1, "logprobs": True}),
            ("/v1/chat/completions", chat | {"model": f"{expert}+starter/exclaim"}),
            ("/v1/completions", {"model": expert, "prompt": prompt, "echo": True}),
            ("/v1/completions", {"model": "starter/base", "prompt": prompt, "max_tokens": 9}),
            ("/v1/messages", {"model": "auto", "max_tokens": 30, "messages": messages}),
            ("/v1/responses", {"model": "auto", "input": prompt}),
            ("/v1/embeddings", {"model": "minilm", "input": prompt}),
            ("/api/chat", {"model": "auto", "messages": messages, "stream": False}),
            ("/api/generate", {"model": "auto", "prompt": prompt, "stream": False}),
            ("/api/show", {"model": expert}),
            (f"/v1/experts/{expert}/call", {"prompt": prompt}),
        ):  # fmt: skip
            record_answer(recorder, client.post(path, json=body))
            if path not in ("/v1/route", "/v1/embeddings", "/api/show"):
                record_answer(recorder, client.post(path, json=body | {"stream": True}))
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/infer", "/api/chat"):
            for body in (
                {},
                {"model": "nobody/nothing", "messages": messages, "max_tokens": 5, "prompt": "x"},
            ):
                record_answer(recorder, client.post(path, json=body))
        ignored = {"model": "auto", "messages": messages, "keep_alive": 5, "store": True, "n": 2}
        record_answer(recorder, client.post("/v1/chat/completions", json=ignored))


def record_answer(recorder: Recorder, answer: httpx.Response) -> None:
    """Record status, type and body of an answer; a stream as the list of its events."""
    kind = answer.headers.get("content-type", "").partition(";")[0]
    body: Any = answer.text
    if kind.endswith("json"):
        body = answer.json()
    elif kind in ("text/event-stream", "application/x-ndjson"):
        body = [read_event(line) for line in answer.text.splitlines() if line]
    name = re.sub(r"\W+", "-", f"{answer.request.method} {answer.request.url.path}".lower())
    ignored = answer.headers.get("x-expertctl-ignored")
    recorder.save(
        name, {"status": answer.status_code, "type": kind, "ignored": ignored, "body": body}
    )


def read_event(line: str) -> Any:
    """Parse a line of a stream as JSON if possible."""
    text = line.removeprefix("data: ")
    try:
        return json.loads(text)
    except ValueError:
        return text


def find_value(document: Any, key: str) -> Any:
    """Find the first value of a key anywhere in a document."""
    if isinstance(document, dict):
        if key in document:
            return document[key]
        document = list(document.values())
    if isinstance(document, list):
        return next((found for v in document if (found := find_value(v, key)) is not None), None)
    return None


@contextmanager
def server(recorder: Recorder, *words: str) -> Iterator[str]:
    """Start a server, wait until it answers, yield its address, and stop it."""
    log = recorder.work / f"{words[0]}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [*EXPERTCTL, *words],
            cwd=recorder.work,
            env=recorder.environment,
            stdout=stream,
            stderr=stream,
        )
    try:
        yield wait_for_address(log, process)
    finally:
        process.terminate()
        process.wait()


def wait_for_address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Wait until a server has printed its address and is ready."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(encoding="utf-8"))
        if found:
            try:
                if httpx.get(found.group() + "/readyz").status_code == httpx.codes.OK:
                    return found.group()
            except httpx.TransportError:
                pass
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text(encoding='utf-8')}")


def main() -> None:
    """Record everything into a new directory."""
    parser = argparse.ArgumentParser(description="Record what users and programs rely on.")
    parser.add_argument("out", type=Path, help="a directory that does not exist yet")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True)
    starter = Path(__file__).resolve().parent.parent / "expertctl" / "_starter"
    with tempfile.TemporaryDirectory() as work:
        recorder = Recorder(out, Path(work).resolve())
        record_runs(recorder)
        record_packages(recorder, starter)
        record_errors(recorder)
        record_registry(recorder)
        record_serving(recorder)
    print(f"{recorder.count} documents in {out}")


if __name__ == "__main__":
    main()
