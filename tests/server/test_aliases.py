"""Aliases: names of models that a client knows, for those that are here."""

import openai
import pytest

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.errors import UsageError
from expertctl.server.aliases import check_bases, check_names, check_served, parse_aliases
from expertctl.server.model_name import ModelNotFoundError, chosen
from expertctl.server.settings import ServeSettings, check_settings
from tests.server.conftest import MakeServed
from tests.server.openai.clients import a_client
from tests.server.served import BASE

ALIASES = {"gpt-4o-mini": "auto", "claude-haiku": BASE, "gpt-sql": "acme/sql:0.5+acme/json"}


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
        ({"../../etc": "auto"}, "not the name of a model"),
        ({"a b": "auto"}, "not the name of a model"),
        ({"a" * 201: "auto"}, "not the name of a model"),
        ({"a": "b", "b": "auto"}, "an alias itself"),
        ({"a": "a"}, "an alias itself"),
        ({f"a{n}": "auto" for n in range(101)}, "at most 100"),
    ],
)
def test_attack_112_an_alias_hides_nothing_that_is_or_may_come(
    aliases: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_names(aliases)
    with pytest.raises(UsageError, match=words):
        check_settings(ServeSettings(aliases=aliases))


def test_an_alias_neither_hides_a_base_nor_stands_for_nothing() -> None:
    check_bases(ALIASES, {BASE, "other"})
    with pytest.raises(UsageError, match="would hide the base other"):
        check_bases({"other": "auto"}, {BASE, "other"})
    with pytest.raises(UsageError, match="'gone', which is no model"):
        check_bases({"gpt": "gone"}, {BASE})


def test_an_alias_stands_for_the_base_that_is_served_and_for_no_other() -> None:
    check_served(ALIASES, base=BASE, bases={BASE, "other"})
    with pytest.raises(UsageError, match="stands for the base other, but tiny is served"):
        check_served({"gpt": "other"}, base=BASE, bases={BASE, "other"})


@pytest.mark.parametrize(("alias", "model"), ALIASES.items())
def test_an_alias_chooses_what_its_model_does(alias: str, model: str) -> None:
    named = chosen(alias, base_name=BASE, aliases=ALIASES)
    assert named == chosen(model, base_name=BASE)


def test_a_model_that_is_no_alias_is_still_not_found() -> None:
    with pytest.raises(ModelNotFoundError):
        chosen("gpt-4o", base_name=BASE, aliases=ALIASES)


def test_a_client_that_knows_one_name_lists_it_and_is_answered(make_served: MakeServed) -> None:
    settings = ServeSettings(aliases=ALIASES, batch=BatchSettings(budget=64 << 20))
    served = make_served(settings)
    with a_client(served) as client:
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
