"""What callers ask for: requests of all APIs, drawn at random, and some that are wrong on purpose.

`Draws` is one endless sequence for a seed. Conversations come again under the same key, each time
with what was answered before; one that grew too long begins anew.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.soak.house import BASE
from benchmarks.soak.mistake import MISTAKES, Mistake

Api = Literal["chat", "completions", "messages", "infer", "jobs", "route"]
Body = dict[str, object]

WRONG = 0.05
"""How many requests are wrong on purpose."""
LEAVES = 0.32
"""How many of the callers mean to go away early; a third of them is answered before."""
CONVERSATIONS = 60
MAX_CHARACTERS = 900
"""A conversation that has more begins anew; a token is a byte, and a context has 2,048."""
SHORT_MS, LONG_MS = (20, 100), 60_000
"""Times that an answer may take: some are too short, the long one never ends."""
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
class Conversation:
    """Turns between one user and the model."""

    key: str
    model: str
    turns: list[dict[str, str]] = field(default_factory=list)

    def say(self, prompt: str) -> list[dict[str, str]]:
        """Return the conversation with one more question."""
        if sum(len(turn["content"]) for turn in self.turns) > MAX_CHARACTERS:
            self.turns.clear()
        return [*self.turns, {"role": "user", "content": prompt}]

    def answered(self, turns: list[dict[str, str]], text: str) -> None:
        """Keep an answer; one without text cannot be a turn."""
        if text.strip():
            self.turns = [*turns, {"role": "assistant", "content": text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as its caller wants it, and when that caller goes away."""

    api: Api
    body: Body
    experts: tuple[str, ...] = ()
    """Those that it names."""
    conversation: Conversation | None = None
    leaves_after: float | None = None
    """Seconds from the request, whatever came by then; a job is deleted."""
    hangs_up_after: int | None = None
    """Events of a stream."""

    @property
    def path(self) -> str:
        """Where it goes."""
        return _PATHS[self.api]

    @property
    def streams(self) -> bool:
        """Whether its answer comes in pieces."""
        return bool(self.body.get("stream"))

    @property
    def texts(self) -> int:
        """How many answers it asks for."""
        wanted = self.body.get("n", 1)
        assert isinstance(wanted, int)
        return wanted

    @property
    def is_timed(self) -> bool:
        """Whether it says that its answer may take less time than it needs."""
        return self.body.get("timeout_ms", LONG_MS) != LONG_MS


class Draws:
    """Requests without end, the same for the same seed; how callers come is drawn elsewhere."""

    def __init__(self, experts: Sequence[str], prompts: Sequence[str], *, seed: int) -> None:
        """Draw among experts that are there as a rule, and prompts that suit some of them."""
        self._drawn = random.Random(seed)  # the load is no secret
        self._experts, self._prompts = tuple(experts), tuple(prompts)
        self._conversations = [
            Conversation(f"somebody {number}", self._model()) for number in range(CONVERSATIONS)
        ]
        self._bodies: dict[Api, Callable[[], tuple[Body, Conversation | None]]] = {
            "chat": self._chat,
            "completions": self._completion,
            "messages": self._message,
            "infer": self._inference,
            "jobs": self._inference,
            "route": self._route,
        }

    def next(self) -> Request | Mistake:
        """Draw the next one."""
        if self._drawn.random() < WRONG:
            return self._drawn.choice(MISTAKES)
        api = self._drawn.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
        body, conversation = self._bodies[api]()
        if api in {"jobs", "route"}:
            body.pop("stream", None)
        after, events = self._leaving(streams=bool(body.get("stream")))
        return Request(
            api=api,
            body=body,
            experts=_named(body),
            conversation=conversation,
            leaves_after=after,
            hangs_up_after=events,
        )

    def _leaving(self, *, streams: bool) -> tuple[float | None, int | None]:
        if self._drawn.random() >= LEAVES:
            return None, None
        if streams and self._drawn.random() < 0.5:
            return None, self._drawn.randint(1, 12)
        return self._drawn.uniform(0.0, 0.3), None

    def _model(self) -> str:
        kind = self._drawn.random()
        if kind < 0.35:
            return "auto"
        if kind < 0.5:
            return BASE
        if kind < 0.9:
            return self._drawn.choice(self._experts)
        first, second = self._drawn.sample([e for e in self._experts if "lora" in e], 2)
        return f"{first}:0.5+{second}"

    def _prompt(self) -> str:
        return f"{self._drawn.choice(self._prompts)} ({self._drawn.randrange(1000)})"

    def _chat(self) -> tuple[Body, Conversation]:
        talk, body = self._talk()
        body |= {"n": self._drawn.choice([1, 1, 1, 2, 3])}
        body |= self._perhaps(0.2, "response_format", {"type": "json_object"})
        body |= self._perhaps(0.1, "logprobs", True)
        return body | self._stops("stop") | self._streamed(usage=True), talk

    def _completion(self) -> tuple[Body, None]:
        body: Body = {
            "model": self._model(),
            "prompt": self._prompt(),
            "n": self._drawn.choice([1, 1, 2, 3]),
            "user": f"somebody {self._drawn.randrange(CONVERSATIONS)}",
        }
        return body | self._shared() | self._stops("stop") | self._streamed(usage=True), None

    def _message(self) -> tuple[Body, Conversation]:
        talk, body = self._talk()
        body |= self._perhaps(0.3, "system", "Answer in one line.")
        return body | self._stops("stop_sequences") | self._streamed(usage=False), talk

    def _talk(self) -> tuple[Conversation, Body]:
        talk = self._drawn.choice(self._conversations)
        key = self._drawn.choice(["session_id", "cache_key"])
        messages = talk.say(self._prompt())
        return talk, {"model": talk.model, "messages": messages, key: talk.key, **self._shared()}

    def _inference(self) -> tuple[Body, None]:
        body = self._planned() | self._shared() | self._stops("stop")
        body |= self._perhaps(0.5, "session_id", f"somebody {self._drawn.randrange(40)}")
        body |= self._perhaps(0.2, "response_format", {"type": "json"})
        return body | self._streamed(usage=False), None

    def _route(self) -> tuple[Body, None]:
        return self._planned(), None

    def _planned(self) -> Body:
        model = self._model()
        forced = [] if model in {"auto", BASE} else model.split("+")
        return {"prompt": self._prompt(), "force_experts": forced}

    def _shared(self) -> Body:
        body: Body = {
            "max_tokens": self._drawn.choice(LENGTHS),
            "temperature": self._drawn.choice([0.0, 0.8]),
        }
        body |= self._perhaps(0.3, "priority", self._drawn.randrange(10))
        return body | self._perhaps(0.06, "timeout_ms", self._drawn.choice([*SHORT_MS, LONG_MS]))

    def _stops(self, name: str) -> Body:
        return self._perhaps(0.3, name, ["\n\n", str(self._drawn.randrange(10))])

    def _streamed(self, *, usage: bool) -> Body:
        if self._drawn.random() < 0.4:
            return {}
        return {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}

    def _perhaps(self, share: float, name: str, value: object) -> Body:
        return {name: value} if self._drawn.random() < share else {}


def _named(body: Body) -> tuple[str, ...]:
    """Return the names of the experts that a body asks for."""
    forced, model = body.get("force_experts", []), body.get("model", "auto")
    assert isinstance(forced, list)
    assert isinstance(model, str)
    asked = forced or ([] if model in {"auto", BASE} else model.split("+"))
    return tuple(str(one).partition(":")[0] for one in asked)
