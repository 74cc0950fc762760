"""Requests of all APIs, drawn at random, and some that are invalid on purpose.

Each invalid request has the status that it must get. The sequence of requests is endless and
determined by a seed. Conversations repeat under the same key, each time with the previous answers;
one that grows too long begins again.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.soak.home import BASE

_JSON = {"Content-Type": "application/json"}
_MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class InvalidRequest:
    """One invalid request."""

    status: int
    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)


def _make_chat_mistake(status: int, **fields: object) -> InvalidRequest:
    body = {"model": BASE, "messages": _MESSAGES, "max_tokens": 4, **fields}
    return InvalidRequest(status, "POST", "/v1/chat/completions", json.dumps(body).encode())


def _make_post_mistake(status: int, path: str, **fields: object) -> InvalidRequest:
    return InvalidRequest(status, "POST", path, json.dumps(fields).encode())


INVALID_REQUESTS = (
    _make_chat_mistake(400, messages=[]),
    _make_chat_mistake(400, n=0),
    _make_chat_mistake(400, n=129),
    _make_chat_mistake(400, temperature=3),
    _make_chat_mistake(400, nonsense=True),
    _make_chat_mistake(400, max_tokens="many"),
    _make_chat_mistake(400, priority=10),
    _make_chat_mistake(400, messages=[{"role": "user", "content": "long " * 1000}]),
    _make_chat_mistake(404, model="nobody/knows-this"),
    _make_chat_mistake(404, model="../../etc/passwd"),
    _make_post_mistake(400, "/v1/completions", model=BASE, prompt=[1, 2, 3]),
    _make_post_mistake(400, "/v1/messages", model=BASE, messages=_MESSAGES),
    _make_post_mistake(400, "/v1/infer", prompt=""),
    _make_post_mistake(400, "/v1/infer", prompt="Hello", force_experts=["/etc/passwd"]),
    _make_post_mistake(404, "/v1/infer", prompt="Hello", force_experts=["nobody/knows-this"]),
    _make_post_mistake(400, "/v1/jobs", prompt="Hello", stream=True),
    _make_post_mistake(400, "/v1/route", prompt="Hello", max_experts=0),
    InvalidRequest(400, "POST", "/v1/infer", b'{"prompt": '),
    InvalidRequest(400, "POST", "/v1/infer", b'{"prompt": "\xff\xfe"}'),
    InvalidRequest(
        415, "POST", "/v1/infer", b'{"prompt": "Hello"}', {"Content-Type": "text/plain"}
    ),
    InvalidRequest(
        403, "POST", "/v1/infer", b"{}", {**_JSON, "Origin": "https://elsewhere.example"}
    ),
    InvalidRequest(421, "POST", "/v1/infer", b"{}", {**_JSON, "Host": "elsewhere.example"}),
    InvalidRequest(404, "GET", "/v1/jobs/of-nobody", headers={}),
    InvalidRequest(404, "DELETE", "/v1/jobs/of-nobody", headers={}),
    InvalidRequest(404, "GET", "/v1/nothing", headers={}),
    InvalidRequest(405, "GET", "/v1/infer", headers={}),
)


Api = Literal["chat", "completions", "messages", "infer", "jobs", "route"]
Body = dict[str, object]

INVALID_SHARE = 0.05
"""The share of requests that are invalid on purpose."""
DISCONNECT_SHARE = 0.32
"""The share of clients that intend to disconnect early; a third of them is answered before."""
CONVERSATIONS = 60
MAX_CHARACTERS = 900
"""A longer conversation begins again; a token is a byte, and a context has 2,048."""
SHORT_MS, LONG_MS = (20, 100), 60_000
"""Time limits of answers: some are too short, the long one is never reached."""
LENGTHS = (8, 24, 64, 128)
_SHARES: dict[Api, int] = {
    "chat": 30,
    "completions": 15,
    "messages": 20,
    "infer": 15,
    "jobs": 14,
    "route": 6,
}
_PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "infer": "/v1/infer",
    "jobs": "/v1/jobs",
    "route": "/v1/route",
}


@dataclass(slots=True, eq=False)
class SoakConversation:
    """Turns between one user and the model."""

    key: str
    model: str
    turns: list[dict[str, str]] = field(default_factory=list)

    def add_question(self, prompt: str) -> list[dict[str, str]]:
        """Return the conversation with one more question."""
        if sum(len(turn["content"]) for turn in self.turns) > MAX_CHARACTERS:
            self.turns.clear()
        return [*self.turns, {"role": "user", "content": prompt}]

    def add_answer(self, turns: list[dict[str, str]], text: str) -> None:
        """Store an answer; one without text cannot be a turn."""
        if text.strip():
            self.turns = [*turns, {"role": "assistant", "content": text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """One request of a client, and the time at which the client disconnects."""

    api: Api
    body: Body
    experts: tuple[str, ...] = ()
    """The experts that it names."""
    conversation: SoakConversation | None = None
    leaves_after: float | None = None
    """Seconds from the request, whatever has arrived by then; a job is deleted."""
    hangs_up_after: int | None = None
    """Number of events of a stream after which the client disconnects."""

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return _PATHS[self.api]

    @property
    def streams(self) -> bool:
        """Whether its answer is streamed."""
        return bool(self.body.get("stream"))

    @property
    def texts(self) -> int:
        """The number of answers that it requests."""
        wanted = self.body.get("n", 1)
        assert isinstance(wanted, int)
        return wanted

    @property
    def is_timed(self) -> bool:
        """Whether its time limit may be shorter than the answer takes."""
        return self.body.get("timeout_ms", LONG_MS) != LONG_MS


class RequestGenerator:
    """Endless requests, the same for the same seed; times of arrival are drawn elsewhere."""

    def __init__(self, experts: Sequence[str], prompts: Sequence[str], *, seed: int) -> None:
        """Draw among experts that are usually present, and prompts that suit some of them."""
        self._drawn = random.Random(seed)  # the load is no secret
        self._experts, self._prompts = tuple(experts), tuple(prompts)
        self._conversations = [
            SoakConversation(f"somebody {number}", self._draw_model())
            for number in range(CONVERSATIONS)
        ]
        self._bodies: dict[Api, Callable[[], tuple[Body, SoakConversation | None]]] = {
            "chat": self._draw_chat,
            "completions": self._draw_completion,
            "messages": self._draw_message,
            "infer": self._draw_inference,
            "jobs": self._draw_inference,
            "route": self._draw_route,
        }

    def next(self) -> SoakRequest | InvalidRequest:
        """Draw the next request."""
        if self._drawn.random() < INVALID_SHARE:
            return self._drawn.choice(INVALID_REQUESTS)
        api = self._drawn.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
        body, conversation = self._bodies[api]()
        if api in {"jobs", "route"}:
            body.pop("stream", None)
        after, events = self._draw_disconnect(streams=bool(body.get("stream")))
        return SoakRequest(
            api=api,
            body=body,
            experts=_list_expert_names(body),
            conversation=conversation,
            leaves_after=after,
            hangs_up_after=events,
        )

    def _draw_disconnect(self, *, streams: bool) -> tuple[float | None, int | None]:
        if self._drawn.random() >= DISCONNECT_SHARE:
            return None, None
        if streams and self._drawn.random() < 0.5:
            return None, self._drawn.randint(1, 12)
        return self._drawn.uniform(0.0, 0.3), None

    def _draw_model(self) -> str:
        kind = self._drawn.random()
        if kind < 0.35:
            return "auto"
        if kind < 0.5:
            return BASE
        if kind < 0.9:
            return self._drawn.choice(self._experts)
        first, second = self._drawn.sample([e for e in self._experts if "lora" in e], 2)
        return f"{first}:0.5+{second}"

    def _draw_prompt(self) -> str:
        return f"{self._drawn.choice(self._prompts)} ({self._drawn.randrange(1000)})"

    def _draw_chat(self) -> tuple[Body, SoakConversation]:
        talk, body = self._draw_conversation()
        body |= {"n": self._drawn.choice([1, 1, 1, 2, 3])}
        body |= self._add_with_probability(0.2, "response_format", {"type": "json_object"})
        body |= self._add_with_probability(0.1, "logprobs", True)
        return body | self._draw_stops("stop") | self._draw_stream_options(usage=True), talk

    def _draw_completion(self) -> tuple[Body, None]:
        body: Body = {
            "model": self._draw_model(),
            "prompt": self._draw_prompt(),
            "n": self._drawn.choice([1, 1, 2, 3]),
            "user": f"somebody {self._drawn.randrange(CONVERSATIONS)}",
        }
        return body | self._draw_shared_fields() | self._draw_stops(
            "stop"
        ) | self._draw_stream_options(usage=True), None

    def _draw_message(self) -> tuple[Body, SoakConversation]:
        talk, body = self._draw_conversation()
        body |= self._add_with_probability(0.3, "system", "Answer in one line.")
        return body | self._draw_stops("stop_sequences") | self._draw_stream_options(
            usage=False
        ), talk

    def _draw_conversation(self) -> tuple[SoakConversation, Body]:
        talk = self._drawn.choice(self._conversations)
        key = self._drawn.choice(["session_id", "cache_key"])
        messages = talk.add_question(self._draw_prompt())
        return talk, {
            "model": talk.model,
            "messages": messages,
            key: talk.key,
            **self._draw_shared_fields(),
        }

    def _draw_inference(self) -> tuple[Body, None]:
        body = self._draw_planned() | self._draw_shared_fields() | self._draw_stops("stop")
        body |= self._add_with_probability(
            0.5, "session_id", f"somebody {self._drawn.randrange(40)}"
        )
        body |= self._add_with_probability(0.2, "response_format", {"type": "json"})
        return body | self._draw_stream_options(usage=False), None

    def _draw_route(self) -> tuple[Body, None]:
        return self._draw_planned(), None

    def _draw_planned(self) -> Body:
        model = self._draw_model()
        forced = [] if model in {"auto", BASE} else model.split("+")
        return {"prompt": self._draw_prompt(), "force_experts": forced}

    def _draw_shared_fields(self) -> Body:
        body: Body = {
            "max_tokens": self._drawn.choice(LENGTHS),
            "temperature": self._drawn.choice([0.0, 0.8]),
        }
        body |= self._add_with_probability(0.3, "priority", self._drawn.randrange(10))
        return body | self._add_with_probability(
            0.06, "timeout_ms", self._drawn.choice([*SHORT_MS, LONG_MS])
        )

    def _draw_stops(self, name: str) -> Body:
        return self._add_with_probability(0.3, name, ["\n\n", str(self._drawn.randrange(10))])

    def _draw_stream_options(self, *, usage: bool) -> Body:
        if self._drawn.random() < 0.4:
            return {}
        return {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}

    def _add_with_probability(self, share: float, name: str, value: object) -> Body:
        return {name: value} if self._drawn.random() < share else {}


def _list_expert_names(body: Body) -> tuple[str, ...]:
    """Return the names of the experts in a body."""
    forced, model = body.get("force_experts", []), body.get("model", "auto")
    assert isinstance(forced, list)
    assert isinstance(model, str)
    asked = forced or ([] if model in {"auto", BASE} else model.split("+"))
    return tuple(str(one).partition(":")[0] for one in asked)
