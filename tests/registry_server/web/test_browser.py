"""The pages in a real browser: Debian's Chromium, without a screen."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access import accounts, namespaces
from registry_server.operation.new_registry import init_registry
from registry_server.publishing.releases import add_key
from registry_server.registry import open_registry
from registry_server.settings import ServerSettings
from tests.registry_server.operation.server_process import ServerProcess, run_server
from tests.registry_server.publishing.package_fixtures import build_template, upload_and_publish
from tests.registry_server.web.test_markdown import ATTACKS
from tests.registry_server.web.test_routes import check_no_active_content

pytestmark = pytest.mark.all
CHROMIUM = "chromium"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A registry with one package whose README tries every attack."""
    folder = tmp_path_factory.mktemp("browser")
    made = init_registry(ServerSettings(data=folder / "registry", read="public"))
    registry = open_registry(made.settings)
    key = PrivateKey.generate()
    with registry.database.write() as connection:
        admin = accounts.find_identity(connection, made.token)
        namespaces.create_namespace(connection, "acme", kind="expert", read="public")
    assert admin is not None
    pem = key.public.pem()
    add_key(registry, admin, namespace="acme", public_key=pem, statement=None)
    template = build_template(folder / "template")
    readme = "# Harmless\n\n" + "\n\n".join(ATTACKS)
    upload_and_publish(
        registry, admin, template.make_package(key=key, files={"README.md": readme.encode()})
    )
    registry.close()
    with run_server(folder / "registry") as server:
        yield server


def chromium(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    assert shutil.which(CHROMIUM), "apt-get install chromium"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=127.0.0.1"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
    return subprocess.run([*command, *words], capture_output=True, check=True, timeout=120)


@pytest.mark.parametrize("path", ["/", "/search?q=sql", "/packages/acme/sql", "/nothing"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_is_seen_without_a_complaint(
    path: str, width: int, server: ServerProcess, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{server.port}{path}"
    shot = tmp_path / "page.png"
    result = chromium(tmp_path, f"--window-size={width},900", f"--screenshot={shot}", url)
    data = shot.read_bytes()
    assert data[:8] == PNG
    assert int.from_bytes(data[16:20], "big") == width
    assert len(data) > 5000
    complaints = re.findall(rb"CONSOLE[^\n]*", result.stderr)
    assert complaints == []


def test_no_attack_of_a_readme_becomes_an_element(server: ServerProcess, tmp_path: Path) -> None:
    """Attack 83, as a browser reads the page."""
    url = f"http://127.0.0.1:{server.port}/packages/acme/sql"
    document = chromium(tmp_path, "--dump-dom", url).stdout.decode()
    assert "Harmless" in document
    check_no_active_content(document)


def test_nobody_frames_the_registry(server: ServerProcess, tmp_path: Path) -> None:
    frame = f"<iframe src='http://127.0.0.1:{server.port}/' width=390></iframe>"
    (tmp_path / "framing.html").write_text(frame)
    result = chromium(tmp_path, "--dump-dom", (tmp_path / "framing.html").as_uri())
    assert b"iframe" in result.stdout
    assert b"frame-ancestors 'none'" in result.stderr
