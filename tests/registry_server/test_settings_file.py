"""registry.toml: strict, complete, and the same after a round trip."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from registry_server.settings import (
    RegistryLimits,
    ServerSettings,
    check_settings,
    override_settings,
    read_settings,
    settings_path,
    write_settings,
)


def written(folder: Path, text: str) -> Path:
    settings_path(folder).write_text(text, encoding="utf-8")
    return folder


def problems(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(InvalidPackageError) as caught:
        read_settings(written(folder, text))
    return caught.value.problems


def test_settings_come_back_as_they_were_written(tmp_path: Path) -> None:
    settings = ServerSettings(
        data=tmp_path,
        name='Experts of "Example" \\ Söhne',
        host="0.0.0.0",
        port=443,
        url="https://experts.example.org",
        read="public",
        certificate=tmp_path / 'a "quoted" \\ name.pem',
        private_key=tmp_path / "tab\there.pem",
        index_interval_days=30,
        trusted_proxies=("10.0.0.0/8", "::1"),
        limits=replace(RegistryLimits(), quota_bytes=7, grace_seconds=1.5),
    )
    write_settings(settings)
    assert read_settings(tmp_path) == settings
    assert settings_path(tmp_path).stat().st_mode & 0o777 == 0o600


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, "")) == ServerSettings(data=tmp_path)


def test_a_relative_certificate_lies_in_the_data_folder(tmp_path: Path) -> None:
    text = 'certificate = "tls/chain.pem"\nprivate_key = "/etc/key.pem"\n'
    settings = read_settings(written(tmp_path, text))
    assert settings.certificate == tmp_path / "tls" / "chain.pem"
    assert settings.private_key == Path("/etc/key.pem")


def test_a_url_loses_its_last_slash(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, 'url = "https://a.b/"')).url == "https://a.b"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("reed = 'public'", "unknown setting 'reed'"),
        ("read = 'everybody'", "read 'everybody' is neither 'public' nor 'token'"),
        ("read = true", "read must be of the kind str"),
        ("port = '80'", "port must be of the kind int"),
        ("port = true", "port must be of the kind int"),
        ("port = 70000", "port 70000 is not a port"),
        ("port = -1", "port -1 is not a port"),
        ("index_interval_days = 0", "index_interval_days 0 is not between 1 and 3650"),
        ("index_interval_days = 3651", "index_interval_days 3651 is not between 1 and 3650"),
        ("index_interval_days = 0.5", "index_interval_days must be of the kind int"),
        ("host = ''", "host '' is not an address to listen on"),
        ("host = 'a/b'", "host 'a/b' is not an address to listen on"),
        ("certificate = 'a'", "certificate and private_key belong together"),
        ("trusted_proxies = '10.0.0.0/8'", "trusted_proxies must be of the kind list"),
        ("trusted_proxies = ['proxy']", "trusted_proxies: 'proxy' is not a network"),
        ("trusted_proxies = [4]", "trusted_proxies: '4' is not a network"),
        ("limits = 3", "limits must be of the kind dict"),
        ("limits.quota = 3", "unknown setting 'limits.quota'"),
        ("limits.quota_bytes = 1.5", "limits.quota_bytes must be an integer of at least 0"),
        ("limits.quota_bytes = -1", "limits.quota_bytes must be an integer of at least 0"),
        ("limits.quota_bytes = true", "limits.quota_bytes must be an integer of at least 0"),
        ("limits.grace_seconds = inf", "limits.grace_seconds must be a number of at least 0"),
        ("limits.grace_seconds = nan", "limits.grace_seconds must be a number of at least 0"),
    ],
)
def test_a_slip_is_named(line: str, problem: str, tmp_path: Path) -> None:
    assert problems(tmp_path, line) == (problem,)


@pytest.mark.parametrize(
    "url",
    [
        "experts.example.org",
        "ftp://a.b",
        "https://",
        "https://a.b/path",
        "https://a.b?x",
        "https://a.b#x",
        "https://user@a.b",
        "https://a.b:99999",
        "https://a.b:0",
        "https://a b",
        "https://[::1",
        "https://ä.b",
    ],
)
def test_a_url_is_a_scheme_and_a_host_and_nothing_else(url: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, f"url = {url!r}")
    assert problem.endswith("is not https://host[:port] or http://host[:port]")


@pytest.mark.parametrize("name", ["two\nlines", "x" * 61, "turned \u202e around", "\x1b[31m"])
def test_a_display_name_is_one_printable_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match="name must be one printable line"):
        check_settings(ServerSettings(data=tmp_path, name=name))


def test_without_a_name_the_host_is_displayed(tmp_path: Path) -> None:
    settings = ServerSettings(data=tmp_path, url="https://experts.example.org")
    assert settings.display_name == "experts.example.org"
    assert replace(settings, name="Ours").display_name == "Ours"


def test_the_known_settings_are_told_only_to_who_named_another(tmp_path: Path) -> None:
    settings = ServerSettings(data=tmp_path)
    with pytest.raises(InvalidPackageError) as wrong:
        check_settings(replace(settings, port=70000))
    assert wrong.value.hint == ""
    settings_path(tmp_path).write_text("reed = 'public'", encoding="utf-8")
    with pytest.raises(InvalidPackageError) as unknown:
        read_settings(tmp_path)
    assert unknown.value.hint.startswith("known: name, host, port")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "port = 'x'\nread = 'x'\nlimits.x = 1")) == 3


@pytest.mark.parametrize("text", ["port = ", "a = 1\na = 2", "\x00", "x = '" + "a" * 70_000 + "'"])
def test_what_is_no_toml_is_refused(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    settings_path(tmp_path).write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidPackageError, match="not valid TOML"):
        read_settings(tmp_path)


def test_a_folder_without_settings_is_no_registry(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no registry here") as caught:
        read_settings(tmp_path)
    assert "registry init" in caught.value.hint


def test_the_command_line_overrides_and_is_checked_the_same(tmp_path: Path) -> None:
    settings = ServerSettings(data=tmp_path)
    changed = override_settings(settings, host="::1", port=0)
    assert (changed.host, changed.port) == ("::1", 0)
    assert override_settings(settings) == settings
    with pytest.raises(InvalidPackageError, match="belong together"):
        override_settings(settings, certificate=tmp_path / "a.pem")


def test_settings_from_elsewhere_are_checked_as_a_file_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match="port"):
        check_settings(ServerSettings(data=tmp_path, port=1 << 20))


def test_the_reference_names_every_setting() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "registry-toml.md"
    rows = re.findall(r"^\| `([a-z_]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    known = [f.name for f in fields(ServerSettings) if f.name not in {"data", "limits"}]
    assert rows == [*known, *(f.name for f in fields(RegistryLimits))]
