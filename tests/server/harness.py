"""The generation server in process: a real engine on a tiny random base, and clients of it.

A base of routed experts and how it is served in less memory than it takes.

Somebody who reads an answer piece by piece and may go away, which a test client cannot.

Results as the engine makes them, for what only looks at them.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from expertctl.engine.generation import FinishReason, GenerationOutput
from expertctl.engine.result import MemoryUsage, Numerics, RunResult
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.serving.request import JobFinished, JobStarted
from expertctl.engine_config import DEFAULT_WARMUP, BatchingConfig, EngineConfig, WarmupConfig
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.reference import Digest
from expertctl.routing.features import extract_features
from expertctl.routing.plan import Plan, SamplingParams
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.router import RoutingResult
from expertctl.server.app import create_app
from expertctl.server.service import Service, build_service
from expertctl.server.settings import ServeSettings
from expertctl.settings import Home, Settings
from tests.factories import make_package, write_base
from tests.store.fixtures import HomeFixture, make_key

URL = "http://127.0.0.1:8000"
BASE = "tiny"
EXPERTS = ("acme/sql", "acme/json", "acme/dates")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ServedPackages:
    """A base whose template takes tools, and packages for it, as files."""

    base_dir: Path
    base: BaseFacts
    packages: Mapping[str, Path]

    def make_home(self, root: Path) -> HomeFixture:
        """A home in which all of it is installed."""
        user_home = HomeFixture(root).trust_keys("acme")
        user_home.bases.add(self.base_dir, name=BASE)
        user_home.install(*self.packages.values())
        return user_home


def make_served_packages(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE
) -> ServedPackages:
    """Write the base and sign the packages; each expert changes what is answered."""
    base_dir = write_base(folder / BASE, tie=False, seed=2, max_position_embeddings=4096)
    config = base_dir / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8"))
    known |= {"model_max_length": 4096}
    known.pop("chat_template", None)
    if chat_template is not None:
        known["chat_template"] = chat_template
    config.write_text(json.dumps(known), encoding="utf-8")
    base = read_base(base_dir)
    packages = {
        name: make_package(
            folder / name.replace("/", "-"),
            name,
            base_dir=base_dir,
            base=base,
            key=make_key("acme"),
            lora={"seed": seed, "scale": 0.4},
        )
        for seed, name in enumerate(EXPERTS, 1)
    }
    return ServedPackages(base_dir, base, packages)


@dataclass
class ServerHarness:
    """One server and what talks to it without sockets."""

    service: Service
    app: Starlette
    user_home: HomeFixture
    clients: list[TestClient] = field(default_factory=list)

    @property
    def engine(self) -> ServingEngine:
        return self.service.engine

    def client(self, secret: str | None = None, **headers: str) -> TestClient:
        """A client with an API key, or with none; the official clients take it, too."""
        shown = {"Authorization": f"Bearer {secret}"} if secret else {}
        client = TestClient(
            self.app, base_url=URL, headers={**shown, **headers}, raise_server_exceptions=True
        )
        client.follow_redirects = False
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()


@contextmanager
def run_app(
    user_home: HomeFixture, settings: ServeSettings | None = None
) -> Iterator[ServerHarness]:
    """Serve what is installed in a home; closed at the end, whatever happens."""
    chosen = settings or ServeSettings(engine=EngineConfig(memory_budget=64 << 20))
    chosen = replace(chosen, engine=replace(chosen.engine, base=BASE))
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    engine = ServingEngine(planner, chosen.engine)
    engine.start()
    try:
        service = build_service(engine, planner, chosen)
        served = ServerHarness(service, create_app(service), user_home)
        yield served
        served.close()
    finally:
        engine.close(seconds=0)


ROUTED_LAYERS, ROUTED_EXPERTS, EXPERTS_PER_TOKEN = 3, 24, 2
ROUTED_BUDGET = 64 << 20
"""Less than the base takes, which is mostly experts of 885 KB in float32."""


def write_routed_base(folder: Path) -> Path:
    """Write it: layer 0 is dense, the others have routed experts."""
    return write_base(
        folder,
        arch="qwen3_moe",
        tie=False,
        seed=2,
        layers=ROUTED_LAYERS + 1,
        hidden=64,
        head_dim=16,
        num_experts=ROUTED_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=1152,
        mlp_only_layers=[0],
    )


@contextmanager
def run_routed_app(
    root: Path,
    budget: int = ROUTED_BUDGET,
    *,
    moe: WarmupConfig = DEFAULT_WARMUP,
    warmup: tuple[str, ...] = (),
) -> Iterator[ServerHarness]:
    """Serve it, with nothing else in the home."""
    user_home = HomeFixture(root)
    user_home.bases.add(write_routed_base(root.parent / "routed"), name=BASE)
    batch = EngineConfig(
        memory_budget=budget, moe=moe, batching=BatchingConfig(rows=2, warm=warmup)
    )
    with run_app(user_home, ServeSettings(engine=batch)) as one:
        yield one


class StreamingClient:
    """One request to an application: ``async with Listener(app, "/v1/infer", {...}) as listener``.

    It is at its end when the block is left: the client went away, unless all had come.
    """

    def __init__(
        self, app: ASGIApp, path: str, body: object, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._app, self._path = app, path
        self._content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._headers = {
            "host": "127.0.0.1:8000",
            "content-type": "application/json",
            "content-length": str(len(self._content)),
            **(headers or {}),
        }
        self._left, self._asked = asyncio.Event(), False
        self._messages = asyncio.Queue[Message]()
        self.may_read = asyncio.Event()
        """Cleared by a test that reads slowly."""
        self.may_read.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disconnect()
        self.may_read.set()
        await self._task

    def disconnect(self) -> None:
        """Close the connection."""
        self._left.set()

    async def wait_until_done(self) -> None:
        """Wait until the application is done with the request."""
        await self._task

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers, once they come."""
        message = await self._messages.get()
        assert message["type"] == "http.response.start"
        headers = {name.decode(): value.decode() for name, value in message["headers"]}
        return message["status"], headers

    async def read_chunk(self) -> bytes:
        """Return the next piece of the body; empty at its end."""
        message = await self._messages.get()
        assert message["type"] == "http.response.body"
        return bytes(message.get("body", b""))

    async def _run(self) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in self._headers.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        self._messages.put_nowait(message)


PROMPT = "Sort: 3, 1, 2"
PLAN = Plan(Digest.compute(b"plan"), 1, "tiny", (), SamplingParams())
STARTED = JobStarted(PLAN, 7, 0)


def make_finished(
    text: str, reason: FinishReason = "stop", *, job_id: str = "0" * 32
) -> JobFinished:
    """The end of a job with one answer."""
    features = extract_features(PROMPT, normalised=PROMPT)
    routed = RoutingResult(PLAN, (), (), features, "lexical", (), (), {})
    generated = GenerationOutput(
        text=text,
        tokens=tuple(range(len(text))),
        finish_reason=reason,
        prefill_tokens=7,
        prefill_ms=2.0,
        first_token_ms=2.5,
        decode_ms=30.0,
        decode_steps=len(text),
    )
    result = RunResult(
        job_id=job_id,
        planned=PlannedPrompt(routed, cast("Any", None), ()),
        dropped=(),
        generated=generated,
        validation_passed=None,
        prompt_tokens=7,
        timings_ms={"queue": 5.0, "route": 1.0, "load": 4.0, "prefill": 2.0, "decode": 30.0},
        memory=MemoryUsage(1000, 500, {}),
        experts_loaded=0,
        kv_reused_tokens=0,
        numerics=Numerics("numpy", "float32", "published", False),
        threads=1,
        warnings=(),
    )
    return JobFinished((result,))
