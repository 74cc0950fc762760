"""Every page in Debian's Chromium: axe-core finds no violation, and the browser no fault."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertctl.reference import PackageName
from expertctl.trust.keys import PrivateKey
from registry_server.access import accounts, namespaces
from registry_server.access.rights import Identity
from registry_server.operation.new_registry import init_registry
from registry_server.publishing.releases import add_key, revoke_key, yank_release
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings
from tests.registry_server.operation.server_process import ServerProcess, run_server
from tests.registry_server.publishing.package_fixtures import build_template, upload_and_publish
from tests.server.status_page.browser import BrowserTab, run_browser

pytestmark = pytest.mark.all
AXE = Path(__file__).parent / "axe"
README = b"""# Writes SQL

It knows **joins** and `CTE`s. See [the docs](https://docs.example.org/sql).

```sql
SELECT name, count(*) FROM orders JOIN customers ON customers.id = orders.customer GROUP BY name;
```

| dialect | supported | since | what differs from the standard, as far as this expert knows |
|---|---|---|---|
| PostgreSQL | yes | 1.0.0 | `RETURNING`, arrays |

> It does not know your tables.
"""
EVALUATION = {"dataset_sha256": "0" * 64, "date": "2026-11-20"}
EVALUATIONS = [
    {"task": "exact sql", "n": 200, "metric": "exact_match", "base": 0.06, "expert": 0.91},
    {"task": "joins", "n": 1500, "metric": "accuracy", "base": 0.5, "expert": 0.41},
    {"task": "perplexity", "n": 64, "metric": "nll", "base": 2.4, "expert": 2.1},
]
PAGES = (
    *("/", "/search", "/search?q=sql", "/search?q=nothing&kind=ia3", "/search?cursor=20"),
    *("/browse", "/browse/namespaces", "/browse/bases", "/publish"),
    *("/namespaces/acme", "/namespaces/empty", "/packages/acme/sql", "/packages/acme/sql/0.9.0"),
    *("/packages/stolen/key", "/packages/acme/plain", "/nothing", "/packages/acme/sqk"),
    *("/search?cursor=x", f"/search?q={'a+' * 9}"),
)
LOGIN_PAGES = (
    "/",
    "/namespaces/acme",
    "/namespaces/hidden",
    "/account",
    "/users",
    "/users/remove?name=bob",
    "/nothing",
)


@dataclass(frozen=True)
class PopulatedRegistry:
    """A served registry with all that its pages can show, and the token of its admin."""

    server: ServerProcess
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


def populate(registry: Registry, admin: Identity, folder: Path) -> None:
    """Publish packages of several namespaces, bases and states."""
    key, stolen = PrivateKey.generate(), PrivateKey.generate()
    with registry.database.write() as connection:
        bob = accounts.create_user(connection, "bob")
        accounts.create_token(connection, bob, name="laptop", scopes=())
        for name, read in (("acme", "public"), ("stolen", "public"), ("hidden", "token")):
            row = namespaces.create_namespace(connection, name, kind="expert", read=read)
            namespaces.set_member(connection, row, "admin", "owner")
            namespaces.set_member(connection, row, "bob", "publisher")
        namespaces.create_namespace(connection, "empty", kind="oci", read="public")
    for name, signer in (("acme", key), ("stolen", stolen), ("hidden", key)):
        pem = signer.public.pem()
        add_key(registry, admin, namespace=name, public_key=pem, statement=None)
    template = build_template(folder)

    def publish(name: str, version: str = "1.0.0", **changes: Any) -> None:
        signer = stolen if name.startswith("stolen") else key
        parcel = template.make_package(name, version, key=signer, **changes)
        upload_and_publish(registry, admin, parcel)

    publish("acme/sql", "0.9.0", description="The first one.")
    publish(
        "acme/sql",
        "1.0.0",
        description="Writes SQL queries from questions in English. " * 8,
        license="Apache-2.0",
        authors=["Ada <ada@example.org>"],
        homepage="https://example.org/sql",
        tags=["databases", "sql"],
        composition={"requires": ["acme/plain@^1"], "conflicts": ["other.example/x/y@*"]},
        evaluation=[entry | EVALUATION for entry in EVALUATIONS],
        limitations=[{"pattern": "CTE", "description": "None.", "workaround": "Use joins."}],
        routing={"task": "code", "keywords": ["sql"]},
        files={"README.md": README},
    )
    publish("acme/plain", description="Has no README.")
    publish("stolen/key", description="Signed by a key that was stolen.")
    publish("hidden/plan", description="For users only.")
    for number in range(25):
        publish(f"acme/skill-{number}", description="One of many.")
    sql = PackageName.parse("acme/sql")
    yank_release(registry, admin, name=sql, version="0.9.0", reason="It mixed up tables.")
    key_id = stolen.public.key_id
    revoke_key(registry, admin, namespace="stolen", key_id=key_id, reason="It was stolen.")


def serve_populated(folder: Path) -> Iterator[PopulatedRegistry]:
    settings = ServerSettings(data=folder / "registry", read="public", name="Experts of Example")
    made = init_registry(settings)
    registry = open_registry(made.settings)
    with registry.database.read() as connection:
        admin = accounts.find_identity(connection, made.token)
    assert admin is not None
    populate(registry, admin, folder / "template")
    registry.close()
    with run_server(folder / "registry") as server:
        yield PopulatedRegistry(server, made.token)


@pytest.fixture(scope="module")
def populated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PopulatedRegistry]:
    yield from serve_populated(tmp_path_factory.mktemp("populated"))


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    assert shutil.which("npm"), "npm is missing: apt-get install nodejs npm"
    folder = tmp_path_factory.mktemp("axe") / "axe"
    shutil.copytree(AXE, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--silent", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[BrowserTab]:
    with run_browser(tmp_path / "profile") as tab:
        yield tab


def wait_for(tab: BrowserTab, script: str) -> None:
    """Wait for an expression to be true, also while one page replaces another."""
    while True:
        try:
            tab.wait_for(script)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
        else:
            return


def go(tab: BrowserTab, url: str, *, width: int = 1280, dark: bool = False) -> None:
    """Open a page, and wait until its script has run."""
    tab.open("about:blank", width=width, dark=dark)
    tab.open(url, width=width, dark=dark)
    target = json.dumps(url.partition("#")[0])
    wait_for(
        tab,
        f"location.href.startsWith({target}) && document.readyState === 'complete' && "
        "document.querySelector('main') !== null",
    )


def submit(tab: BrowserTab, form: str, **fields: str) -> None:
    """Fill in a form, send it, and wait for the page that follows."""
    for name, value in fields.items():
        field = f"{form} [name={name}]"
        tab.evaluate(f"document.querySelector({json.dumps(field)}).value = {json.dumps(value)}")
    tab.evaluate("window.left = true")
    tab.evaluate(f"document.querySelector({json.dumps(f'{form} button')}).click()")
    wait_for(tab, "window.left !== true && document.readyState === 'complete'")


def log_in(tab: BrowserTab, populated: PopulatedRegistry) -> None:
    go(tab, f"{populated.url}/login")
    submit(tab, "form.fields", token=populated.token)
    assert tab.read_text("h1").startswith("admin")


def list_violations(tab: BrowserTab, axe: str) -> list[str]:
    """What axe-core says of the page, and whether it is wider than the window."""
    tab.evaluate(f"{axe}; 0")
    found = tab.evaluate("axe.run().then((result) => result.violations)")
    lines = [
        f"{each['id']}: {each['help']}: {node['html'][:200]}"
        for each in found
        for node in each["nodes"]
    ]
    if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
        lines.append("the page is wider than the window")
    return lines


SIZES = pytest.mark.parametrize("width", [390, 1280])
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@SIZES
@SCHEMES
def test_public_pages_violate_no_rule(
    width: int, dark: bool, tab: BrowserTab, axe: str, populated: PopulatedRegistry
) -> None:
    found = {}
    for path in (*PAGES, "/login"):
        go(tab, populated.url + path, width=width, dark=dark)
        found[path] = list_violations(tab, axe)
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert all(url.startswith((populated.url, "about:")) for url in tab.asked)
    policy = [text for text in tab.complaints if "status of 40" not in text]
    assert policy == []


@SIZES
@SCHEMES
def test_pages_of_a_login_violate_no_rule(
    width: int, dark: bool, tab: BrowserTab, axe: str, populated: PopulatedRegistry
) -> None:
    found = {}
    go(tab, f"{populated.url}/login", width=width, dark=dark)
    submit(tab, "form.fields", token="xpt_wrong")
    found["a wrong token"] = list_violations(tab, axe)
    log_in(tab, populated)
    for path in LOGIN_PAGES:
        go(tab, populated.url + path, width=width, dark=dark)
        found[path] = list_violations(tab, axe)
    go(tab, f"{populated.url}/account", width=width, dark=dark)
    submit(tab, "form[action='/account/tokens']", name=f"ci {width} {dark}")
    found["a new token"] = list_violations(tab, axe)
    go(tab, f"{populated.url}/account", width=width, dark=dark)
    link = tab.evaluate("document.querySelector('a.danger').href")
    go(tab, link, width=width, dark=dark)
    found["before a token is revoked"] = list_violations(tab, axe)
    go(tab, f"{populated.url}/account", width=width, dark=dark)
    submit(tab, "form[action='/account/tokens']", name="ci", place="../x")
    found["no new token"] = list_violations(tab, axe)
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_check_finds_what_is_wrong(
    tab: BrowserTab, axe: str, populated: PopulatedRegistry
) -> None:
    go(tab, populated.url, width=390)
    tab.evaluate("document.querySelector('main').innerHTML += '<img src=/static/icon.svg>'")
    tab.evaluate("document.querySelector('main').style.width = '500px'")
    found = list_violations(tab, axe)
    assert [line.partition(":")[0] for line in found] == [
        "image-alt",
        "the page is wider than the window",
    ]


def test_a_button_copies_a_command(tab: BrowserTab, populated: PopulatedRegistry) -> None:
    go(tab, f"{populated.url}/packages/acme/sql")
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    tab.send_command("Browser.grantPermissions", permissions=permissions)
    tab.evaluate("document.querySelector('.copy').click()")
    wait_for(tab, "document.querySelector('.copy').innerText === 'Copied'")
    host = populated.url.removeprefix("http://")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == f"expertctl install {host}/acme/sql"


def test_pages_work_without_scripts(tab: BrowserTab, populated: PopulatedRegistry) -> None:
    tab.send_command("Network.setBlockedURLs", urls=["*.js*"])
    log_in(tab, populated)
    go(tab, f"{populated.url}/packages/acme/sql")
    assert "expertctl install" in tab.read_text("main")
    assert "Copy" not in tab.read_text("main")
    submit(tab, "form[action='/logout']")
    assert "Log in" in tab.read_text("header")
