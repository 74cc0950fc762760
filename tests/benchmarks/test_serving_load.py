"""What the clients of `benchmarks.serving_load` ask, when, and what they note of answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Event, Thread

from benchmarks.served_home import SUBJECTS, make_question
from benchmarks.serving_load import (
    UNANSWERED,
    CompletionTask,
    ConversationTurn,
    ask_one_by_one,
    draw_arrival_times,
    percentile,
    run_open_loop,
)


def test_a_percentile_is_the_nearest_rank() -> None:
    """The examples of https://en.wikipedia.org/wiki/Percentile (the nearest-rank method)."""
    scores = [15, 20, 35, 40, 50]
    assert [percentile(scores, p) for p in (0.05, 0.3, 0.4, 0.5, 1.0)] == [15, 20, 20, 35, 50]
    many = [3, 6, 7, 8, 8, 10, 13, 15, 16, 20]
    assert [percentile(many, p) for p in (0.25, 0.5, 0.75, 1.0)] == [7, 8, 15, 20]
    assert percentile([4.0], 0.99) == 4.0


def test_arrivals_are_as_many_as_the_rate_says_at_random_times_that_a_seed_repeats() -> None:
    arrivals = draw_arrival_times(50.0, seconds=20.0, seed=1)
    assert len(arrivals) == 1000
    assert arrivals == draw_arrival_times(50.0, seconds=20.0, seed=1)
    assert arrivals != draw_arrival_times(50.0, seconds=20.0, seed=2)
    assert all(n / 50.0 <= at <= (n + 1) / 50.0 for n, at in enumerate(arrivals))
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert max(gaps) > 1.8 / 50.0
    assert min(gaps) < 0.2 / 50.0


def test_a_turn_says_all_that_was_said_by_turns() -> None:
    body = ConversationTurn("acme/sql", 8, ("Hello", "Hi.", "And then?"), "s1").body
    assert body["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And then?"},
    ]
    assert (body["model"], body["session_id"], body["stream"]) == ("acme/sql", "s1", True)


def test_questions_are_for_one_subject_each() -> None:
    asked = [make_question(number) for number in range(len(SUBJECTS))]
    assert len(set(asked)) == len(SUBJECTS) == 16
    assert all(subject[2] in text for subject, text in zip(SUBJECTS, asked, strict=True))


def test_what_comes_is_noted_but_for_who_speaks_and_why_it_ended() -> None:
    with listening() as url:
        _, [told] = ask_one_by_one(url, [ConversationTurn("m", 2, ("now",), "s")])
    assert (told.status, told.text, len(told.times)) == (200, "12", 2)
    assert (told.tokens, told.cached, told.timings_ms) == (2, 5, {"prefill": 1.0})
    assert told.end is not None
    assert told.first <= told.last <= told.end


def test_an_open_loop_hangs_up_on_what_is_not_answered_by_its_end() -> None:
    def ask(number: int) -> CompletionTask:
        return CompletionTask("m", 2, "now" if number == 0 else "never")

    with listening() as url:
        begun, told = run_open_loop(url, ask, arrival_times=[0.0, 0.05, 0.1], seconds=0.5)
    assert [one.status for one in told] == [200, UNANSWERED, UNANSWERED]
    assert [one.end is None for one in told] == [False, True, True]
    assert all(one.started - begun < 0.5 for one in told)


CHUNKS: list[dict[str, object]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "1"}}]},
    {"choices": [{"delta": {"content": "2"}}]},
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}},
        "expertctl": {"timings_ms": {"prefill": 1.0}},
    },
]


@contextmanager
def listening() -> Iterator[str]:
    """A server that answers with `CHUNKS`, and to who says never not before it ends."""
    ends = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != ("/v1/chat/completions" if "messages" in asked else "/v1/completions"):
                self.send_error(404)
                return
            if asked.get("prompt") == "never":
                ends.wait()
                return
            self.send_response(200)
            self.end_headers()
            for chunk in CHUNKS:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            ends.set()
            server.shutdown()
