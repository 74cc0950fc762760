"""Hostile chat templates: no escape, and none takes long or much memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.engine.text.chat_template import ChatTemplate
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import ExpertError, InvalidPackageError

ROOT = Path(__file__).parents[3]
LIMIT = 768 << 20
CPU_SECONDS = 600
"""Enough for all bombs on a slow machine; one without bounds takes hours."""
LONG = ConversationMessage("user", "ab " * 100_000)


def render(text: str) -> str:
    template = ChatTemplate(TemplateSource(text, Path("base/chat_template.jinja")))
    return template.render([LONG], special_tokens={})


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages.__class__ }}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ range.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner }}{{ lipsum() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (messages | attr('append'))(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ ''.format.__self__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ '%s' % messages }}",
    "{{ ['{0.__class__}'] | map('format', messages) | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map(attribute='content.__class__.__mro__') | list }}",
    "{{ messages | groupby('__class__') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace({'_x': 1}) }}",
    "{{ namespace.mro() }}",
    "{{ (1).to_bytes(9, 'big') }}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.maketrans('a', 'b') }}",
    "{% autoescape true %}{% set x %}a{% endset %}{{ x.join(['b', 'c']) }}{% endautoescape %}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{{ caller.__globals__ }}{{ loop.__class__ }}",
    "{% for x in [1] %}{{ loop.__class__.__mro__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__func__ }}{{ m._func.__globals__ }}",
    "{{ environment }}{{ context }}{{ get_flashed_messages.__globals__ }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_no_template_reaches_python(text: str) -> None:
    try:
        written = render(text)
    except ExpertError:
        return
    for leak in ("class", "builtins", "globals", "root:", "function", "object at", "uid="):
        assert leak not in written
    assert "<" not in written


BOMBS = [
    "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
    "{% for a in range(10000) %}{% for b in range(10000) if false %}{% endfor %}{% endfor %}",
    "{{ range(1000000000) | list }}",
    "{{ range(10000) | list | length * 0 }}{% for x in range(10**9) %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ (0,) * 1000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 2 ** 100000000 }}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x.join([n.x, n.x, n.x]) %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}"
    "{% for i in range(99) %}{% set n.x = m(n.x) %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x == n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% set n = namespace() %}{% for i in range(60) %}{% set m = namespace(a=n, b=n) %}"
    "{% set n = m %}{% endfor %}{{ n }}",
    "{% set n = namespace() %}{% set n.n = n %}{{ n }}{{ [n] }}{{ [n] | tojson }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}{{ 'a'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ [1] | batch(1000000000, 0) | list }}{{ [1] | slice(1000000000) | list }}",
    "{{ range(10000) | map('list') | list }}",
    "{% set x = messages[0].content %}{% for i in range(10000) %}{{ x }}{% endfor %}",
    "{% set x = messages[0].content %}{% for i in range(10000) %}{% if 'zz' in x %}{% endif %}"
    "{% endfor %}",
    "{% set x = messages[0].content %}{% for i in range(10000) %}{% set y = x[::-1] %}{% endfor %}",
    "{% for i in range(10000) %}{% set y = messages[0].content.upper() %}{% endfor %}",
    "{% for i in range(10000) %}{% set y = messages[0].content.split() %}{% endfor %}",
    "{% for i in range(10000) %}{% set y = messages[0].content | list %}{% endfor %}",
    "{% set x = messages[0].content %}{{ x.strip(x ~ 'c') }}{{ x | trim(x) }}",
    "{% set x = messages[0].content | list %}{% macro m() %}{% for i in range(10000) %}{{ x }}"
    "{% endfor %}{% endmacro %}{{ m() }}",
    "{% for i in range(2) recursive %}{{ loop(range(2)) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 500 + "1" + "]" * 500 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "9" * 100_000 + " }}",
]


PROGRAM = """
import json, resource, sys
from tests.engine.text.test_template_sandbox import BOMBS, CPU_SECONDS, LIMIT, render
from expertctl.errors import InvalidPackageError
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
for text in BOMBS:
    try:
        written = render(text)
    except InvalidPackageError as error:
        written = error.message
    print(json.dumps([len(written), written[:300]]), flush=True)
"""


@pytest.fixture(scope="module")
def exploded() -> list[tuple[int, str]]:
    """Length and text of every bomb, in a process of little memory that ends after minutes."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


@pytest.mark.all
@pytest.mark.parametrize("number", range(len(BOMBS)), ids=lambda n: BOMBS[n][:90])
def test_no_template_takes_long_or_much_memory(
    exploded: list[tuple[int, str]], number: int
) -> None:
    length, written = exploded[number]
    assert "MemoryError" not in written
    assert length < 3_000_000


def test_a_template_cannot_change_the_conversation() -> None:
    messages = [ConversationMessage("user", "x")]
    template = ChatTemplate(TemplateSource("{{ messages[0].update({}) }}", Path("t")))
    with pytest.raises(InvalidPackageError, match=r"dict\.update|not available|unsafe"):
        template.render(messages, special_tokens={})


def test_what_is_not_there_counts_as_nothing() -> None:
    assert render("{% for x in missing %}{{ x }}{% else %}none{% endfor %}") == "none"
    assert render("{% for x in [1, 2] | map('string') %}{{ x }}{% endfor %}") == "12"
    assert render("{{ 3 * [1] }}{{ 2 * 'ab' }}{{ 'ab'.strip('b') }}") == "[1, 1, 1]ababa"


@pytest.mark.parametrize(
    "text", ["{% for x in 3 %}{% endfor %}", "{% for x in none %}{% endfor %}"]
)
def test_what_cannot_be_gone_through_is_an_error(text: str) -> None:
    with pytest.raises(InvalidPackageError, match="not iterable"):
        render(text)


def test_every_refusal_names_what_is_not_there() -> None:
    for text, named in {
        "{{ 'a'.center(3) }}": "str.center is not available",
        "{{ '{}'.format(1) }}": "formatting is not available",
        "{{ range(99999) }}": "range() of more than 10000",
        "{{ 'a' * 10000000 }}": "too large",
        "{{ 2 ** 9999 }}": "a number that is too large",
        "{{ 'a'.strip('b' * 300) }}": "stripping more than 256",
        "{{ 'a' | indent(65) }}": "from 0 to 64",
        "{% set x = namespace(_a=1) %}": "a namespace cannot hold '_a'",
        "{% for x in [1] recursive %}{% endfor %}": "recursive loops",
        "{{ [1] | join(attribute='a') }}": "use map before it",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}": "more work",
    }.items():
        with pytest.raises(InvalidPackageError) as caught:
            render(text)
        assert named in caught.value.message


def test_one_rendering_does_not_pay_for_another() -> None:
    for _ in range(5):
        text = "{% for a in range(9000) %}{% for b in range(90) %}{% endfor %}{% endfor %}ok"
        assert render(text) == "ok"
