"""``run`` and ``chat`` with a running server: the same answers, and nothing sent to strangers."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine_config import EngineConfig
from expertctl.errors import BaseMismatchError, TooLargeError
from expertctl.schema.validation import find_problems
from expertctl.server.settings import ServeSettings
from expertctl.store.server_record import create_secret
from expertctl.user_request import MAX_MESSAGES
from tests.cli.command_runner import CommandRunner, ReplacedStdin, expertctl, stdin
from tests.cli.remote_servers import (
    RecordedServer,
    Said,
    forward_to,
    record_server,
    record_stranger,
)
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder
from tests.server.conftest import stock
from tests.server.harness import BASE, ServedPackages, ServerHarness, run_app

__all__ = ["expertctl", "keeps_all_code", "keeps_code", "kept_folder", "stdin", "stock"]

PROMPT = "Sort: 3, 1, 2"
SHORT = ("--max-tokens", "9")
GREEDY = ("--greedy", *SHORT)
SECRET = create_secret()
PROVED = "/v1/proof"


@pytest.fixture(scope="module")
def served(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHarness]:
    user_home = stock.make_home(tmp_path_factory.mktemp("remote") / "home")
    settings = ServeSettings(engine=EngineConfig(memory_budget=64 << 20), secret=SECRET)
    with run_app(user_home, settings) as one:
        yield one


@pytest.fixture(autouse=True)
def home(served: ServerHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of the server, from a folder that is no project."""
    monkeypatch.setenv("EXPERT_HOME", str(served.user_home.root))
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.chdir(tmp_path)
    (served.user_home.root / "last-conversation.json").unlink(missing_ok=True)
    return served.user_home.root


@pytest.fixture
def server(served: ServerHarness) -> Iterator[RecordedServer]:
    with record_server(served) as one:
        yield one


def refuse(*_: object) -> tuple[int, str, bytes]:
    """What a process does that took over a port: it proves nothing."""
    return 200, "application/json", b'{"proof": "%s"}' % (b"0" * 64)


def prove(served: ServerHarness, body: bytes) -> tuple[int, str, bytes]:
    """What the server of the record answers to a nonce."""
    kind = {"Content-Type": "application/json"}
    return 200, "application/json", served.client().post(PROVED, content=body, headers=kind).content


def prove_and_leave(
    served: ServerHarness, method: str, path: str, headers: object, body: bytes
) -> tuple[int, str, bytes]:
    """The same, before the connection is closed; a next one would be answered."""
    return 200, "application/json; last", prove(served, body)[2]


@pytest.mark.parametrize(
    "words",
    [
        (PROMPT, *GREEDY),
        (PROMPT, "--seed", "7", "--temperature", "1.5", *SHORT),
        (PROMPT, "--expert", "acme/sql:0.5", "--expert", "acme/json", *GREEDY),
        (PROMPT, "--no-experts", "--system", "Be brief", *GREEDY),
        (PROMPT, "--template", "{prompt}, please", "--stop", "q", *GREEDY),
        (PROMPT, "--exclude", "acme/sql", "--max-experts", "1", "--base", BASE, *GREEDY),
        ("x " * 9000, "--truncate", *GREEDY),
    ],
)
def test_the_answer_is_that_of_this_process(
    server: RecordedServer, expertctl: CommandRunner, words: tuple[str, ...]
) -> None:
    theirs = expertctl("run", *words, "--json").document
    assert server.answered == 1
    ours = expertctl("run", *words, "--json", "--local").document
    assert server.answered == 1
    assert find_problems(theirs, "run") == []
    for name in ("text", "finish_reason", "tokens", "notes", "warnings"):
        assert theirs[name] == ours[name], name
    assert theirs["plan"]["identity"] == ours["plan"]["identity"]
    assert theirs["plan"]["params"] == ours["plan"]["params"]


def test_the_text_and_what_is_told_of_it_have_one_form(
    server: RecordedServer, expertctl: CommandRunner
) -> None:
    theirs = expertctl("run", PROMPT, *GREEDY, "--stats")
    ours = expertctl("run", PROMPT, *GREEDY, "--stats", "--local")
    assert theirs.out == ours.out
    told = {line.split()[0] for line in ours.err.splitlines() if line.strip()}
    assert told - {"queue"} <= {line.split()[0] for line in theirs.err.splitlines() if line.strip()}
    assert "answered by" not in theirs.err, "only with -v, or on a terminal"
    assert f"answered by the server at {server.url} (pid {os.getpid()})" in (
        expertctl("run", PROMPT, *GREEDY, "-v").err
    )


def test_a_conversation_goes_on_with_and_without_a_server(
    server: RecordedServer, expertctl: CommandRunner, home: Path
) -> None:
    kept = home / "last-conversation.json"

    def converse(*where: str) -> tuple[list[str], Any]:
        expertctl("run", PROMPT, "--system", "Be brief", *GREEDY)
        said = [expertctl("run", "And 9, 8?", "-c", *GREEDY, *where).out]
        said.append(expertctl("run", "Again", "-c", "-s", "Shout", *GREEDY, *where).out)
        return said, json.loads(kept.read_text())

    theirs, ours = converse(), converse("--local")
    assert theirs[0] == ours[0]
    assert theirs[1]["messages"] == ours[1]["messages"]
    assert theirs[1]["plan"]["identity"] == ours[1]["plan"]["identity"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_chat_is_the_same_with_a_server(
    server: RecordedServer, expertctl: CommandRunner, stdin: ReplacedStdin, tmp_path: Path
) -> None:
    lines = (
        b"Sort: 3, 1, 2\nAnd 9, 8\n/retry\n/experts acme/json:0.5\nonce more\n/system Be brief\n"
        b"/set temperature 0\nbriefly\n/experts none\nalone\n/experts auto\nand now\n"
        b"/set greedy no\nfreely\n/save %s\n/reset\nanew\n"
    )

    def converse(name: str, *where: str) -> tuple[list[Any], Any]:
        stdin.pipe(lines % bytes(tmp_path / name))
        document = expertctl("chat", *GREEDY, "--json", "--seed", "3", *where).document
        return document["turns"], json.loads((tmp_path / name).read_text())

    theirs, ours = converse("theirs"), converse("ours", "--local")
    assert server.answered == 9
    for one, other in zip(theirs[0], ours[0], strict=True):
        assert one["prompt"] == other["prompt"]
        assert one["plan"]["identity"] == other["plan"]["identity"]
        assert one["plan"]["params"] == other["plan"]["params"]
        assert one["text"] == other["text"]
    assert theirs[1]["messages"] == ours[1]["messages"]


def send_bytes(data: bytes) -> Iterator[bytes]:
    """Each byte alone, as a slow network may send them."""
    return (data[place : place + 1] for place in range(len(data)))


def test_a_chat_joins_what_the_network_divides(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner, stdin: ReplacedStdin
) -> None:
    words = ("chat", "--no-experts", "--temperature", "2", "--seed", "4", "-n", "40")
    lines = b"Sort: 3, 1, 2\nAnd 9, 8\n"
    with record_stranger(forward_to(served, send_bytes), server) as slow:
        stdin.pipe(lines)
        theirs = expertctl(*words).out
    assert slow.answered == 2
    assert not theirs.isascii(), "a letter of several bytes is divided"
    stdin.pipe(lines)
    assert theirs == expertctl(*words, "--local").out


def test_a_chat_shows_an_answer_as_it_comes(served: ServerHarness, server: RecordedServer) -> None:
    go_on = threading.Event()

    def wait_within(data: bytes) -> Iterator[bytes]:
        begun, first, rest = data.partition(b"event: piece")
        piece, end, rest = rest.partition(b"\n\n")
        yield begun + first + piece + end
        go_on.wait(120)
        yield rest

    with (
        record_stranger(forward_to(served, wait_within), server),
        subprocess.Popen(
            [sys.executable, "-m", "expertctl", "chat", PROMPT, *GREEDY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as chat,
    ):
        assert chat.stdout is not None
        first = os.read(chat.stdout.fileno(), 1 << 16)
        go_on.set()
        rest = chat.stdout.read()
    assert (bool(first), rest.strip() != b"", chat.returncode) == (True, True, 0)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("lines", [b"And 9, 8\n", b"/retry\n"])
def test_a_chat_goes_on_after_an_answer_breaks_off(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    stdin: ReplacedStdin,
    tmp_path: Path,
    lines: bytes,
    is_closed: bool,
) -> None:
    """The broken turn leaves the conversation as it was; the server is asked again."""

    def break_second(data: bytes) -> Iterator[bytes]:
        if broken.answered != 2:
            yield data
            return
        begun, _, rest = data.partition(b"event: piece")
        yield begun + b"event: piece" + rest.partition(b"event: piece")[0]
        if is_closed:
            yield b""

    def converse(name: str, said: bytes, *where: str, code: int = 0) -> tuple[list[Any], Any]:
        stdin.pipe(b"Sort: 3, 1, 2\n%sonce more\n/save %s\n" % (said, bytes(tmp_path / name)))
        words = ("--seed", "4", *SHORT, "--json", *where)
        turns = expertctl("chat", *words, exit_code=code).document["turns"]
        return turns, json.loads((tmp_path / name).read_text())["messages"]

    with record_stranger(forward_to(served, break_second), server) as broken:
        (first, second, third), theirs = converse("theirs", lines, code=6)
    ours = converse("ours", b"", "--local")
    assert second["error"]["code"] == "unreachable"
    assert "`--local` answers in this process" in second["error"]["hint"]
    assert [first["text"], third["text"]] == [turn["text"] for turn in ours[0]]
    assert theirs == ours[1]


def test_commands_of_a_chat_ask_the_server(
    server: RecordedServer, expertctl: CommandRunner, stdin: ReplacedStdin, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    stdin.pipe(
        b"Sort: 3, 1, 2\n/experts\n/plan\n/plan %s\n/feedback good\n/set top_p 7\n"
        b"/experts no/such\n/load %s\n" % (bytes(plan), bytes(tmp_path / "missing"))
    )
    told = expertctl("chat", "--expert", "acme/sql", *GREEDY, exit_code=2).err
    assert "*  acme/sql@" in told
    assert "  acme/sql@1.0.0: " in told
    assert "was rated good" in told
    assert "top_p 7.0 must be above 0" in told
    assert "no/such" in told
    assert "missing: no such file" in told
    assert set(json.loads(plan.read_text())) == {"plan", "threads"}
    assert expertctl("run", PROMPT, "--plan", plan, *GREEDY).out


@pytest.mark.parametrize(
    "words",
    [
        ("--local",),
        ("--memory-budget", "1GiB"),
        ("--dtype", "float32"),
        ("--adapter-dtype", "published"),
        ("--verify-base",),
        ("--trace",),
        ("--on-budget", "fewer"),
    ],
)
def test_what_only_this_process_can_do_is_done_here(
    server: RecordedServer, expertctl: CommandRunner, words: tuple[str, ...]
) -> None:
    told = expertctl("run", PROMPT, *GREEDY, *words, "-v").err
    assert server.requests == []
    if words != ("--local",):
        assert f"no server is used: {words[0]} needs an engine in this process" in told


def test_an_expert_in_a_file_is_read_in_this_process(
    server: RecordedServer, expertctl: CommandRunner, stock: ServedPackages
) -> None:
    file = stock.packages["acme/sql"]
    assert expertctl("run", PROMPT, "--expert", file, *GREEDY).out
    assert server.requests == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [("EXPERT_DTYPE", "float32"), ("EXPERT_BASE", BASE)],
)
def test_a_server_with_other_settings_is_not_used(
    server: RecordedServer,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
) -> None:
    monkeypatch.setenv(setting, value)
    assert "is not used: it has another" in expertctl("run", PROMPT, *GREEDY, "-v").err
    assert server.requests == []


def test_a_setting_that_changes_no_answer_does_not_matter(
    server: RecordedServer, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_MEMORY_BUDGET", "1GiB")
    monkeypatch.setenv("EXPERT_MOE_LEARN", "no")
    expertctl("run", PROMPT, *GREEDY)
    assert server.answered == 1


def test_a_project_has_versions_of_its_own(
    server: RecordedServer, expertctl: CommandRunner, tmp_path: Path
) -> None:
    (tmp_path / "experts.toml").write_text('[experts]\n"acme/sql" = "=1.0.0"\n')
    assert "another project" in expertctl("run", PROMPT, *GREEDY, "-v").err
    assert server.requests == []


def test_a_server_that_writes_prompts_to_its_log_is_not_used_unasked(
    served: ServerHarness, expertctl: CommandRunner
) -> None:
    with record_server(served, log_prompts=True) as server:
        assert "another log_prompts" in expertctl("run", PROMPT, *GREEDY, "-v").err
    assert server.requests == []


def test_a_run_that_would_choose_another_base_happens_here(
    served: ServerHarness, expertctl: CommandRunner, stock: ServedPackages
) -> None:
    """The newest base answers where no expert decides; only the server looks for that."""
    newer = served.user_home.bases.add(stock.base_dir, name="newer")
    try:
        with record_server(served) as server:
            alone = expertctl("run", PROMPT, "--no-experts", *GREEDY, "--json").document
            assert (alone["plan"]["base"], server.answered) == ("newer", 0)
            named = expertctl("run", PROMPT, "--base", BASE, *GREEDY, "--json").document
            assert (named["plan"]["base"], server.answered) == (BASE, 1)
    finally:
        served.user_home.bases.remove(newer)


def test_the_server_of_the_wanted_base_answers_among_several(
    served: ServerHarness, expertctl: CommandRunner, stdin: ReplacedStdin
) -> None:
    def refuse_base(method: str, path: str, headers: object, body: bytes) -> tuple[int, str, bytes]:
        if path == PROVED:
            return prove(served, body)
        error = {"code": "base_mismatch", "message": "this server serves other", "hint": ""}
        return 422, "application/json", json.dumps({"error": error}).encode()

    with (
        record_server(served) as like,
        record_stranger(refuse_base, like, base="other") as other,
        record_server(served) as server,
    ):
        assert expertctl("run", PROMPT, *GREEDY).out
        assert expertctl("run", PROMPT, "--base", BASE, *GREEDY).out
        stdin.pipe(b"/experts\n/experts acme/sql\nSort: 3, 1, 2\n/experts\n")
        told = expertctl("chat", *GREEDY).err
    assert "from now on: acme/sql@1.0.0" in told
    assert "*  acme/sql@1.0.0" in told
    assert server.answered == 3
    assert other.answered == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--max-experts", "1"), b"/experts acme/sql acme/json\n"),
        (("--exclude", "acme/sql"), b"/experts acme/sql\n"),
        (("--no-experts",), b"/experts acme/sql:0.5\nSort: 3, 1, 2\n"),
    ],
)
def test_experts_are_named_in_a_chat_as_in_this_process(
    server: RecordedServer,
    expertctl: CommandRunner,
    stdin: ReplacedStdin,
    words: tuple[str, ...],
    line: bytes,
) -> None:
    is_refused = words != ("--no-experts",)

    def converse(*where: str) -> Any:
        stdin.pipe(line)
        said = expertctl("chat", *words, *GREEDY, "--json", *where, exit_code=2 * is_refused)
        told = said.err.partition("from now on: ")[2].partition("\n")[0]
        return told, [turn.get("error", turn.get("text")) for turn in said.document["turns"]]

    assert converse() == converse("--local")
    assert "/v1/route" in server.paths


@pytest.mark.parametrize(
    ("status", "code"), [(422, BaseMismatchError.code), (413, TooLargeError.code)]
)
def test_a_chat_goes_on_here_where_the_server_does_not_take_it(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    stdin: ReplacedStdin,
    status: int,
    code: str,
) -> None:
    lines = b"/experts acme/sql\n/set seed 3\nSort: 3, 1, 2\nAnd 9, 8\n/retry\n"
    forward = forward_to(served)

    def refuse_infer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        if path != "/v1/infer":
            return forward(method, path, headers, body)
        error = {"code": code, "message": "this server does not take it", "hint": ""}
        return status, "application/json", json.dumps({"error": error}).encode()

    with record_stranger(refuse_infer, server) as other:
        stdin.pipe(lines)
        theirs = expertctl("chat", "--system", "Be brief", *GREEDY)
    assert other.paths.count("/v1/infer") == 1
    stdin.pipe(lines)
    assert theirs.out == expertctl("chat", "--system", "Be brief", *GREEDY, "--local").out


def test_a_conversation_too_long_for_a_server_goes_on_here(
    server: RecordedServer, expertctl: CommandRunner, stdin: ReplacedStdin, home: Path
) -> None:
    turn = [{"role": "user", "content": "3, 1, 2"}, {"role": "assistant", "content": "1, 2, 3"}]
    kept = home / "last-conversation.json"

    def go_on(*where: str) -> str:
        kept.write_text(json.dumps({"messages": turn * (MAX_MESSAGES // 2 + 1)}))
        stdin.pipe(b"And 9, 8\n")
        return expertctl("chat", "--continue", "--truncate", *GREEDY, *where).out

    assert go_on() == go_on("--local") != ""
    assert server.requests == []


@pytest.mark.parametrize(
    ("answered", "lines", "code"),
    [
        (1, b"Sort: 3, 1, 2\nAnd 9, 8\n/retry\nonce more\n", 0),
        (1, b"Sort: 3, 1, 2\n/retry\nonce more\n", 0),
        (2, b"Sort: 3, 1, 2\n/experts auto\nAnd 9, 8\n/retry\n", 0),
        (2, b"Sort: 3, 1, 2\n/experts none\nAnd 9, 8\n/retry\nonce more\n", 0),
        (1, b"Sort: 3, 1, 2\n%s\n/retry\n" % (b"x " * 9000), 2),
        (1, b"Sort: 3, 1, 2\n%s\n" % (b"x " * 9000), 2),
    ],
)
def test_a_chat_goes_on_here_after_its_server_is_gone(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    stdin: ReplacedStdin,
    tmp_path: Path,
    answered: int,
    lines: bytes,
    code: int,
) -> None:
    body, forward = tmp_path / "body.txt", forward_to(served)
    body.write_text("41, 7, 23")

    def answer_first(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        return (forward if gone.answered < answered else refuse)(method, path, headers, body)

    def converse(name: str, *where: str) -> tuple[list[Any], Any, Any]:
        saved, plan = tmp_path / name, tmp_path / f"{name}-plan"
        stdin.pipe(lines + b"/plan %s\n/feedback good\n/save %s\n" % (bytes(plan), bytes(saved)))
        words = ("--body", body, *GREEDY, "--json", *where)
        said = expertctl("chat", *words, exit_code=code)
        assert "was rated good" in said.err
        shown = [(turn.get("text"), turn.get("error")) for turn in said.document["turns"]]
        plan_identity = json.loads(plan.read_text())["plan"]["identity"]
        return shown, json.loads(saved.read_text())["messages"], plan_identity

    with record_stranger(answer_first, server) as gone:
        theirs = converse("theirs")
    assert gone.answered == answered
    assert theirs == converse("ours", "--local")


def test_a_chat_asks_its_server_again_where_this_process_cannot_go_on(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    stdin: ReplacedStdin,
    home: Path,
) -> None:
    """No engine is opened for the error, and no turn is lost."""
    hidden, bases, forward = home / "hidden", home / "bases", forward_to(served)

    def refuse_second(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        if path != "/v1/infer" or other.paths.count(path) != 1:
            if hidden.exists():
                hidden.rename(bases)
            return forward(method, path, headers, body)
        bases.rename(hidden)
        error = {"code": BaseMismatchError.code, "message": "not now", "hint": ""}
        return 422, "application/json", json.dumps({"error": error}).encode()

    lines = b"Sort: 3, 1, 2\n%sonce more\n/save %s\n"
    with record_stranger(refuse_second, server) as other:
        stdin.pipe(lines % (b"And 9, 8\n", bytes(home / "theirs")))
        words = ("chat", "--base", BASE, "--no-experts", *GREEDY, "--json")
        theirs = expertctl(*words, exit_code=3).document["turns"]
    stdin.pipe(lines % (b"", bytes(home / "ours")))
    ours = expertctl(*words, "--local").document["turns"]
    assert theirs[1]["error"]["code"] == "not_found"
    assert [theirs[0]["text"], theirs[2]["text"]] == [turn["text"] for turn in ours]
    saved = [json.loads((home / name).read_text())["messages"] for name in ("theirs", "ours")]
    assert saved[0] == saved[1]


def test_a_server_that_ends_after_its_proof_is_not_used(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner
) -> None:
    def prove_and_close(
        method: str, path: str, headers: object, body: bytes
    ) -> tuple[int, str, bytes]:
        return 200, "application/json; close", prove(served, body)[2]

    with record_stranger(prove_and_close, server) as ended:
        told = expertctl("run", PROMPT, *GREEDY)
    assert "the server closed the connection" in told.err
    assert (bool(told.out), ended.paths) == (True, [PROVED])


def test_a_mistake_is_told_as_without_a_server(
    server: RecordedServer, expertctl: CommandRunner
) -> None:
    for words, code in (
        (("", *GREEDY), 2),
        ((PROMPT, "--temperature", "9"), 2),
        ((PROMPT, "--greedy", "--temperature", "1"), 2),
        ((PROMPT, "--expert", "acme/none"), 3),
        ((PROMPT, "--expert", "acme/sql", "--no-experts"), 2),
        (("x " * 9000,), 2),
    ):
        theirs = expertctl("run", *words, exit_code=code).err
        assert theirs == expertctl("run", *words, "--local", exit_code=code).err


def test_an_impostor_on_the_port_never_sees_the_prompt(
    server: RecordedServer, expertctl: CommandRunner
) -> None:
    with record_stranger(refuse, server) as impostor:
        told = expertctl("run", PROMPT, *GREEDY)
    assert told.out
    assert "this is not the server of its record" in told.err
    assert impostor.paths == [PROVED]


def test_a_server_that_ends_after_its_proof_gets_no_second_connection(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner
) -> None:
    """Whoever listens there next has proved nothing."""
    with record_stranger(partial(prove_and_leave, served), server) as ended:
        told = expertctl("run", PROMPT, *GREEDY)
    assert (bool(told.out), ended.paths) == (True, [PROVED])
    assert "the connection broke" in told.err


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_record_that_others_may_read_or_write_is_not_used(
    server: RecordedServer, expertctl: CommandRunner, mode: int
) -> None:
    server.record.chmod(mode)
    told = expertctl("run", PROMPT, *GREEDY)
    assert f"warning: {server.record} is not used: others may read it" in told.err
    assert told.out
    assert server.requests == []


def test_a_server_that_does_not_answer_is_left(
    server: RecordedServer, expertctl: CommandRunner
) -> None:
    record = json.loads(server.record.read_text())
    server.record.write_text(json.dumps(record | {"url": "http://127.0.0.1:1"}))
    told = expertctl("run", PROMPT, *GREEDY)
    assert "the server at http://127.0.0.1:1" in told.err
    assert told.out


def test_a_busy_server_is_an_error_with_a_way_out(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner
) -> None:
    def refuse_all(method: str, path: str, headers: object, body: bytes) -> tuple[int, str, bytes]:
        if path == PROVED:
            return prove(served, body)
        error = {"code": "rate_limit", "message": "the queue is full", "hint": ""}
        return 429, "application/json", json.dumps({"error": error}).encode()

    with record_stranger(refuse_all, server):
        told = expertctl("run", PROMPT, *GREEDY, exit_code=6).err
    assert "the queue is full" in told
    assert "`--local` answers in this process" in told


def test_a_named_server_answers_and_nothing_else_does(
    served: ServerHarness, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_server(served) as server:
        pass
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("EXPERT_SERVER", server.url)
    told = expertctl("run", PROMPT, *GREEDY, exit_code=6).err
    assert "cannot be reached" in told
    assert "`--local` answers in this process" in told
    assert not (tmp_path / "empty" / "store").exists()
    refused = expertctl("run", PROMPT, "--dtype", "int8", exit_code=2).err
    assert f"--dtype cannot be used with the server {server.url}" in refused
    assert "--local" in refused
    monkeypatch.setenv("EXPERT_SERVER", "http://experts.example.org")
    monkeypatch.setenv("EXPERT_ALLOW_HTTP", "yes")
    assert "unencrypted" in expertctl("run", PROMPT, exit_code=2).err


def test_a_named_server_gets_the_key_of_the_environment(
    served: ServerHarness, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = served.service.keys
    secret = keys.create("alice", now=0.0).secret
    try:
        with record_server(served) as server:
            monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "empty"))
            monkeypatch.setenv("EXPERT_SERVER", server.url)
            assert "an API key is required" in expertctl("run", PROMPT, exit_code=6).err
            monkeypatch.setenv("EXPERT_API_KEY", secret)
            assert expertctl("run", PROMPT, *GREEDY).out
            named = expertctl("run", PROMPT, "--base", "other", *GREEDY, exit_code=4).err
            assert f"this server serves {BASE}, not other" in named
    finally:
        keys.path.unlink()


def test_the_owner_of_the_home_needs_no_key(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner
) -> None:
    keys = served.service.keys
    keys.create("alice", now=0.0)
    try:
        assert expertctl("run", PROMPT, *GREEDY).out
        assert server.answered == 1
        assert served.client("xpo_" + "0" * 64).get("/v1/experts").status_code == 401
    finally:
        keys.path.unlink()


def test_neither_the_engine_nor_numpy_is_imported(server: RecordedServer, home: Path) -> None:
    program = (
        "import sys\n"
        "from expertctl.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "loaded = [n for n in sys.modules if n.startswith(('expertctl.engine.', "
        "'expertctl.routing', 'numba', 'numpy', 'torch', 'rich', 'sqlite'))]\n"
        "print(code, loaded, file=sys.stderr)\n"
    )
    template = ("--template", "{prompt}, please", "--stats")
    for words in (
        ["run", PROMPT, *GREEDY],
        ["run", "And 9?", "-c", *GREEDY],
        ["run", PROMPT, *template, *GREEDY],
        ["chat", *GREEDY],
        ["chat", *template, *GREEDY],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            input=b"/set top_k 3\nSort: 3, 1, 2\nAnd 9, 8\n/retry\n/plan\n/reset\n"
            if words[0] == "chat"
            else b"",
            capture_output=True,
            check=True,
        )
        assert done.stderr.decode().splitlines()[-1] == "0 []"
    assert server.answered == 9
