"""Making a registry: all of it, once, and again after a crash anywhere in between."""

import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError, StoreError, UsageError
from registry_server.access import accounts, rights
from registry_server.access.rights import Action
from registry_server.operation import new_registry
from registry_server.operation.new_registry import create_admin_token, init_registry
from registry_server.registry import open_registry
from registry_server.settings import ServerSettings, lock_data_folder, read_settings, settings_path


def settings(tmp_path: Path, **given: object) -> ServerSettings:
    return ServerSettings(data=tmp_path / "registry", **given)  # type: ignore[arg-type]


def check_admin_token(data: Path, secret: str) -> None:
    registry = open_registry(read_settings(data))
    try:
        with registry.database.read() as connection:
            identity = accounts.find_identity(connection, secret)
    finally:
        registry.close()
    assert identity is not None
    assert (identity.name, identity.admin) == ("admin", True)
    assert identity.covers(Action.ADMIN, None, None)


def test_a_new_registry_is_whole_and_its_owners_alone(tmp_path: Path) -> None:
    made = init_registry(settings(tmp_path, read="public", url="https://experts.example.org"))
    data = tmp_path / "registry"
    assert data.stat().st_mode & 0o777 == 0o700
    assert (data / "keys").stat().st_mode & 0o777 == 0o700
    assert (data / "keys" / "index.pem").stat().st_mode & 0o777 == 0o600
    assert read_settings(data) == made.settings
    check_admin_token(data, made.token)
    registry = open_registry(made.settings)
    assert registry.index_key.public.key_id == made.fingerprint
    registry.check_integrity()
    with registry.database.read() as connection:
        (entry,) = rights.list_audit_rows(connection, limit=10)
    registry.close()
    assert (entry.action, entry.target, entry.actor) == ("registry.init", "admin", None)
    assert made.token not in repr(made)
    assert made.token not in entry.detail


def test_an_existing_registry_is_left_alone(tmp_path: Path) -> None:
    made = init_registry(settings(tmp_path))
    before = made.settings.index_key.read_bytes()
    with pytest.raises(UsageError, match="there is a registry here already") as caught:
        init_registry(settings(tmp_path))
    assert "--new-admin-token" in caught.value.hint
    assert made.settings.index_key.read_bytes() == before


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "thesis.tex").write_text("dear")
    with pytest.raises(UsageError, match=r"it holds thesis\.tex"):
        init_registry(settings(tmp_path))
    assert [p.name for p in (tmp_path / "registry").iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        init_registry(settings(tmp_path))


def test_impossible_settings_make_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match="url"):
        init_registry(settings(tmp_path, url="nonsense"))
    assert not (tmp_path / "registry").exists()


def test_an_empty_folder_of_the_person_will_do_and_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir(mode=0o755)
    init_registry(settings(tmp_path))
    assert (tmp_path / "registry").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "step",
    [
        "make_folders",
        "create_index_key",
        "open_registry",
        "_create_admin_token",
        "write_settings",
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_init_is_finished_by_the_next(
    step: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes before or after any step; only a finished registry counts as one."""
    real = getattr(new_registry, step)

    def dies(*arguments: object) -> object:
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    def dies_with_mode(path: Path, *, mode: int) -> None:
        if after:
            real(path, mode=mode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(new_registry, step, dies_with_mode if step == "make_folders" else dies)
        with pytest.raises(KeyboardInterrupt):
            init_registry(settings(tmp_path))
    if settings_path(tmp_path / "registry").exists():
        check_admin_token(tmp_path / "registry", create_admin_token(tmp_path / "registry"))
        return
    made = init_registry(settings(tmp_path))
    check_admin_token(tmp_path / "registry", made.token)


def test_two_inits_at_once_make_one_registry(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from registry_server.operation.new_registry import init_registry\n"
        "from registry_server.settings import ServerSettings\n"
        "try: print(init_registry(ServerSettings(data=Path(sys.argv[1]))).token)\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "registry")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].strip() for process in both]
    made = [text for text in said if text.startswith("xpt_")]
    assert len(made) == 1, said
    assert {*said} - {*made} <= {"UsageError", "StoreError"}
    check_admin_token(tmp_path / "registry", made[0])


def test_another_admin_token_can_always_be_made_by_who_owns_the_folder(tmp_path: Path) -> None:
    made = init_registry(settings(tmp_path))
    secret = create_admin_token(tmp_path / "registry")
    assert secret != made.token
    for token in (secret, made.token):
        check_admin_token(tmp_path / "registry", token)


def test_a_token_for_no_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no registry here"):
        create_admin_token(tmp_path)


def test_nothing_is_made_where_a_server_runs(tmp_path: Path) -> None:
    data = tmp_path / "registry"
    data.mkdir()
    with lock_data_folder(data), pytest.raises(StoreError, match="a server runs"):
        init_registry(settings(tmp_path))
