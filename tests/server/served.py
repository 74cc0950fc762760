"""The generation server in process: a real engine on a tiny random base, and clients of it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.testclient import TestClient

from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.routing.planner import Planner
from expertctl.server.app import create_app
from expertctl.server.service import Service, service_of
from expertctl.server.settings import ServeSettings
from expertctl.settings import Home, Settings
from tests.factories import make_package, write_base
from tests.store.shop import House, a_key

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
class Stock:
    """A base whose template takes tools, and packages for it, as files."""

    base_dir: Path
    base: BaseFacts
    packages: Mapping[str, Path]

    def house(self, root: Path) -> House:
        """A home in which all of it is installed."""
        house = House(root).trusting("acme")
        house.bases.add(self.base_dir, name=BASE)
        house.install(*self.packages.values())
        return house


def make_stock(folder: Path) -> Stock:
    """Write the base and sign the packages; each expert changes what is answered."""
    base_dir = write_base(folder / BASE, tie=False, seed=2, max_position_embeddings=4096)
    config = base_dir / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8"))
    known |= {"chat_template": CHAT_TEMPLATE, "model_max_length": 4096}
    config.write_text(json.dumps(known), encoding="utf-8")
    base = read_base(base_dir)
    packages = {
        name: make_package(
            folder / name.replace("/", "-"),
            name,
            base_dir=base_dir,
            base=base,
            key=a_key("acme"),
            lora={"seed": seed, "scale": 0.4},
        )
        for seed, name in enumerate(EXPERTS, 1)
    }
    return Stock(base_dir, base, packages)


@dataclass
class Served:
    """One server and what talks to it without sockets."""

    service: Service
    app: Starlette
    house: House
    opened: list[TestClient] = field(default_factory=list)

    @property
    def engine(self) -> Any:
        return self.service.engine

    def client(self, secret: str | None = None, **headers: str) -> TestClient:
        """A client with an API key, or with none; the official clients take it, too."""
        shown = {"Authorization": f"Bearer {secret}"} if secret else {}
        client = TestClient(
            self.app, base_url=URL, headers={**shown, **headers}, raise_server_exceptions=True
        )
        client.follow_redirects = False
        self.opened.append(client)
        return client

    def close(self) -> None:
        for client in self.opened:
            client.close()


@contextmanager
def serving(house: House, settings: ServeSettings | None = None) -> Iterator[Served]:
    """Serve what is installed in a home; closed at the end, whatever happens."""
    chosen = settings or ServeSettings(batch=BatchSettings(budget=64 << 20))
    chosen = replace(chosen, batch=replace(chosen.batch, base=BASE))
    planner = Planner.open(Settings(Home(house.root), encoder="lexical"))
    engine = BatchEngine(planner, chosen.batch)
    engine.start()
    try:
        service = service_of(engine, planner, chosen)
        served = Served(service, create_app(service), house)
        yield served
        served.close()
    finally:
        engine.close(seconds=0)
