"""Aliases: names of models that a client knows, for those that are here."""

from pathlib import Path
from queue import SimpleQueue

import openai
import pytest

from expertctl.engine_config import EngineConfig
from expertctl.errors import ExpertError, IncompatibleError, NotFoundError, UsageError
from expertctl.server.app import EngineWorker
from expertctl.server.settings import (
    ModelNotFoundError,
    ServeSettings,
    check_alias_base,
    check_alias_bases,
    check_alias_experts,
    check_alias_names,
    check_settings,
    parse_aliases,
    parse_model,
)
from expertctl.settings import Home, Settings
from tests.factories import write_base
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, ServedPackages
from tests.server.openai.client import make_client
from tests.store.fixtures import HomeFixture

ALIASES = {"gpt-4o-mini": "auto", "claude-haiku": BASE, "gpt-sql": "acme/sql:0.5+acme/json"}


@pytest.fixture(scope="module")
def stocked(stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory) -> HomeFixture:
    return stock.make_home(tmp_path_factory.mktemp("aliases") / "home")


def test_aliases_are_read_as_they_are_typed() -> None:
    texts = ["gpt-4o-mini=auto", " claude-haiku = tiny ", "meta/Llama-3.1=acme/sql"]
    assert parse_aliases(texts) == {
        "gpt-4o-mini": "auto",
        "claude-haiku": "tiny",
        "meta/Llama-3.1": "acme/sql",
    }


@pytest.mark.parametrize("text", ["", "gpt", "gpt=", "=auto", " = "])
def test_what_is_no_alias_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not ALIAS=MODEL"):
        parse_aliases([text])


def test_an_alias_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        parse_aliases(["a=auto", "a=tiny"])


@pytest.mark.parametrize(
    ("aliases", "words"),
    [
        ({"auto": "tiny"}, "would hide the model auto"),
        ({"acme/sql": "auto"}, "would hide that expert"),
        ({"acme/not-installed-yet": "auto"}, "would hide that expert"),
        ({"acme/sql@1.2.0": "auto"}, "would hide that expert"),
        ({"acme/sql:0.5+acme/json": "auto"}, "would hide that expert"),
        ({"../../etc": "auto"}, "not a valid model name"),
        ({"a b": "auto"}, "not a valid model name"),
        ({"a" * 201: "auto"}, "not a valid model name"),
        ({"a": "b", "b": "auto"}, "an alias itself"),
        ({"a": "a"}, "an alias itself"),
        ({"a": "acme/sql:0.5.5"}, "the alias a: '0.5.5' in .* is not a weight"),
        ({"a": "acme/sql:99"}, "the alias a: weight"),
        ({"a": "acme/sql@>>1"}, "the alias a: "),
        ({"a": "+".join(f"acme/e{n}" for n in range(40))}, "the alias a: 40 experts"),
        ({f"a{n}": "auto" for n in range(101)}, "at most 100"),
    ],
)
def test_attack_112_an_alias_hides_nothing_that_is_or_may_come(
    aliases: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_alias_names(aliases)
    with pytest.raises(UsageError, match=words):
        check_settings(ServeSettings(aliases=aliases))


def test_an_alias_neither_hides_a_base_nor_stands_for_nothing() -> None:
    check_alias_bases(ALIASES, {BASE, "other"})
    with pytest.raises(UsageError, match="would hide the base other"):
        check_alias_bases({"other": "auto"}, {BASE, "other"})
    with pytest.raises(NotFoundError, match="'gone', which is no model"):
        check_alias_bases({"gpt": "gone"}, {BASE})
    with pytest.raises(NotFoundError) as refused:
        check_alias_bases({"gpt": "tinny"}, {BASE})
    assert "did you mean tiny?" in refused.value.hint


def test_an_alias_of_what_is_installed_is_served(stocked: HomeFixture) -> None:
    check_alias_experts({**ALIASES, "gpt-old": "acme/sql@^1"}, stocked.store)


@pytest.mark.parametrize(
    ("model", "fact", "hint"),
    [
        ("acme/sqll", "the alias q: acme/sqll is not installed", "did you mean acme/sql?"),
        ("acme/sql+acme/datse", "acme/datse is not installed", "did you mean acme/dates?"),
        ("acme/sql@^2", "no installed version fits acme/sql@^2", "installed: 1.0.0"),
        ("other/thing", "other/thing is not installed", "`expertctl list`"),
    ],
)
def test_an_alias_of_an_expert_that_is_not_installed_is_refused(
    stocked: HomeFixture, model: str, fact: str, hint: str
) -> None:
    with pytest.raises(NotFoundError) as refused:
        check_alias_experts({"q": model}, stocked.store)
    assert fact in refused.value.message
    assert hint in refused.value.hint
    missing = model.rpartition("+")[2]
    assert f"`expertctl install {missing}`" in refused.value.hint


def test_an_alias_that_the_served_base_cannot_answer_ends_the_start(
    stock: ServedPackages, tmp_path: Path
) -> None:
    user_home = stock.make_home(tmp_path / "home")
    other = write_base(tmp_path / "other", seed=9, hidden_size=48)
    user_home.bases.add(other, name="other")
    settings = ServeSettings(
        aliases={"q": "acme/sql"}, engine=EngineConfig(base="other", memory_budget=64 << 20)
    )
    opening = EngineWorker(settings, Settings(Home(user_home.root), encoder="lexical"))
    told = SimpleQueue[ExpertError | None]()
    opening.start(told.put)
    error = told.get()
    opening.shut_down()
    assert isinstance(error, IncompatibleError)
    assert error.message.startswith("the alias q: ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_expert_that_was_removed_since_is_missed_in_the_words_of_the_client(
    make_served: MakeServed, path: str
) -> None:
    settings = ServeSettings(aliases={"q": "acme/sql"}, engine=EngineConfig(memory_budget=64 << 20))
    served = make_served(settings)
    body = {"model": "q", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    assert served.client().post(path, json=body).status_code == 200
    store = served.user_home.store
    store.remove(next(one for one in store.list_experts() if str(one.package) == "acme/sql"))
    answer = served.client().post(path, json=body)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert "acme/sql is not installed" in error["message"]
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "not_found_error")
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")


def test_an_alias_stands_for_the_base_that_is_served_and_for_no_other() -> None:
    check_alias_base(ALIASES, base=BASE, bases={BASE, "other"})
    with pytest.raises(UsageError, match="stands for the base other, but tiny is served"):
        check_alias_base({"gpt": "other"}, base=BASE, bases={BASE, "other"})


@pytest.mark.parametrize(("alias", "model"), ALIASES.items())
def test_an_alias_chooses_what_its_model_does(alias: str, model: str) -> None:
    named = parse_model(alias, base_name=BASE, aliases=ALIASES)
    assert named == parse_model(model, base_name=BASE)


def test_a_model_that_is_no_alias_is_still_not_found() -> None:
    with pytest.raises(ModelNotFoundError):
        parse_model("gpt-4o", base_name=BASE, aliases=ALIASES)


def test_a_client_that_knows_one_name_lists_it_and_is_answered(make_served: MakeServed) -> None:
    settings = ServeSettings(aliases=ALIASES, engine=EngineConfig(memory_budget=64 << 20))
    served = make_served(settings)
    with make_client(served) as client:
        names = [model.id for model in client.models.list()]
        assert set(ALIASES) < set(names)
        assert client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
        answer = client.chat.completions.create(
            model="gpt-4o-mini", max_tokens=2, messages=[{"role": "user", "content": "Hi"}]
        )
        assert answer.model == "gpt-4o-mini"
        done = client.completions.create(model="claude-haiku", prompt="Hi", max_tokens=2)
        assert done.usage is not None
        with pytest.raises(openai.NotFoundError, match="gpt-4o"):
            client.models.retrieve("gpt-4o")
    asked = {
        "model": "claude-haiku",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "?"}],
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = asked if path == "/v1/messages" else {k: asked[k] for k in ("model", "messages")}
        assert served.client().post(path, json=body).status_code == 200
