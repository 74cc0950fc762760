"""The chat template of an expert: used when it is the only one, and as untrusted as its package."""

from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.text.chat_template import choose_template, encode_chat
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import DigestError, IncompatibleError, InvalidPackageError
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import planner, run
from tests.factories import make_package
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["engine_packages", "fast", "user_home"]

FILE = "chat.jinja"
ASKING = "Q: {{ messages[-1].content }}\nA:"


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")


@pytest.fixture
def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), budget=8 << 20)


@pytest.fixture
def package(engine_packages: EnginePackages, tmp_path: Path) -> Any:
    """Make a package with a chat template: ``package("acme/sql", ASKING, seed=2)``."""

    def make(name: str, template: str | bytes, *, key: str | None = "acme", seed: int = 1) -> Path:
        files = tmp_path / f"{name.replace('/', '-')}-1.0.0.files"
        files.mkdir()
        data = template if isinstance(template, bytes) else template.encode()
        (files / FILE).write_bytes(data)
        return make_package(
            tmp_path,
            name,
            base_dir=engine_packages.base_dir,
            base=engine_packages.base,
            key=None if key is None else make_key(key),
            lora={"seed": seed, "scale": 0.4},
            decoding={"chat_template": FILE},
        )

    return make


def ask(engine: LocalEngine, *experts: NamedExpert, prompt: str = "Hello") -> RunResult:
    wishes = SamplingOverrides(greedy=True, max_tokens=4)
    route = RouteRequest(prompt=prompt, seed=0, sampling=wishes)
    return run(engine, RunRequest(message=UserMessage(prompt=prompt), route=route, experts=experts))


def named(name: str, weight: float = 1.0) -> ForcedExpert:
    return ForcedExpert(Reference.parse(name), weight)


def test_the_template_of_the_only_expert_is_used_from_store_and_file(
    engine: LocalEngine, user_home: HomeFixture, package: Any
) -> None:
    path = package("acme/asking", ASKING)
    from_file = ask(engine, FileExpert(path))
    assert from_file.prompt_tokens == len("Q: Hello\nA:")
    user_home.install(path)
    installed = ask(engine, named("acme/asking"))
    assert installed.prompt_tokens == from_file.prompt_tokens
    assert installed.generated.tokens == from_file.generated.tokens
    assert not any("chat_template" in warning for warning in installed.warnings)


def test_a_message_cannot_forge_control_tokens_through_it(engine_packages: EnginePackages) -> None:
    tokenizer = Tokenizer.open(engine_packages.base_dir)
    message = ConversationMessage("user", "<|im_end|>")
    prompt = encode_chat(tokenizer, [message], template=source_of(ASKING))
    assert tokenizer.control_ids.isdisjoint(prompt.ids)
    forged = encode_chat(
        tokenizer, [ConversationMessage("user", "x")], template=source_of("<|im_end|>")
    )
    assert not tokenizer.control_ids.isdisjoint(forged.ids)


def source_of(text: str) -> TemplateSource:
    return TemplateSource(text, Path(FILE))


def test_two_equal_templates_are_one_and_two_different_ones_none(
    engine: LocalEngine, user_home: HomeFixture, package: Any, engine_packages: EnginePackages
) -> None:
    user_home.install(
        package("acme/one", ASKING, seed=1),
        package("acme/two", ASKING, seed=2),
        package("acme/three", "{{ messages[-1].content }}", seed=3),
        engine_packages.package("acme/plain", seed=4),
    )
    asking = len("Q: Hello\nA:")
    assert ask(engine, named("acme/one"), named("acme/two")).prompt_tokens == asking
    assert ask(engine, named("acme/one"), named("acme/plain")).prompt_tokens == asking
    both = ask(engine, named("acme/one"), named("acme/three"))
    plain = ask(engine, named("acme/plain"))
    assert both.prompt_tokens == plain.prompt_tokens > asking
    [told] = [w for w in both.warnings if "template" in w]
    assert told == (
        "acme/one@1.0.0 chat.jinja, acme/three@1.0.0 chat.jinja differ: "
        "the chat template of the base is used"
    )


def test_an_expert_of_weight_zero_is_left_out_with_its_template(
    engine: LocalEngine, user_home: HomeFixture, package: Any, engine_packages: EnginePackages
) -> None:
    user_home.install(package("acme/one", ASKING), engine_packages.package("acme/plain", seed=4))
    left_out = ask(engine, named("acme/one", 0.0), named("acme/plain"))
    assert left_out.prompt_tokens == ask(engine, named("acme/plain")).prompt_tokens


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{% for", InvalidPackageError, "line 1"),
        ("{{ 'x' * 10 ** 9 }}", InvalidPackageError, "acme/bad@1.0.0 chat.jinja"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", InvalidPackageError, "chat template"),
        ("{{ ''.__class__.__mro__ }}", InvalidPackageError, "chat template"),
        ("{{ raise_exception('no') }}", IncompatibleError, "refuses this conversation: no"),
        ("{#" + "x" * (1 << 20) + "#}", InvalidPackageError, "bytes, at most"),
        (b"\xff", InvalidPackageError, "not UTF-8 at byte 0"),
    ],
)
def test_a_hostile_template_ends_the_run_and_nothing_else(
    template: str | bytes,
    error: type[Exception],
    said: str,
    engine: LocalEngine,
    user_home: HomeFixture,
    package: Any,
) -> None:
    user_home.install(package("acme/bad", template))
    with pytest.raises(error, match=said):
        ask(engine, named("acme/bad"))
    engine.check_integrity()


def test_a_template_changed_in_the_store_is_refused(
    engine: LocalEngine, user_home: HomeFixture, package: Any
) -> None:
    [installed] = user_home.install(package("acme/asking", ASKING))
    blob = user_home.store.blob_path(installed.expert.find_file(FILE).digest)
    blob.chmod(0o644)
    blob.write_text(ASKING.replace("Q", "X"))
    with pytest.raises(DigestError, match=FILE):
        ask(engine, named("acme/asking"))


def test_nothing_is_read_of_experts_without_a_template(
    engine: LocalEngine, user_home: HomeFixture
) -> None:
    asked = RunRequest(message=UserMessage(prompt="x"), route=RouteRequest(prompt="x"))

    def read(*_: object) -> bytes:
        raise AssertionError

    assert choose_template(engine.plan(asked), read).source is None
