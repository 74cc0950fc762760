"""The public ``model_signing`` tool accepts what we sign, and we accept what it signs.

The tool is found through ``EXPERTCTL_MODEL_SIGNING`` (the path of its program), or installed into
an environment of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.cli import app
from expertctl.errors import SignatureError
from expertctl.reference import FileDigest, hash_file
from expertctl.trust.bundle import read_bundle, sign_files, verify_bundle
from expertctl.trust.keys import PrivateKey
from tests.factories import make_package, write_base

pytestmark = pytest.mark.all

MODEL = Path(__file__).parent / "vectors" / "model"
MODEL_SIGNING = os.environ.get("EXPERTCTL_MODEL_SIGNING")


def installed(folder: Path) -> Path:
    """Install the tool into a new environment; skip when that cannot be done here."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "model-signing==1.1.1", "pyopenssl"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"model-signing cannot be installed: {done.stderr[-300:]}")
    return folder / "bin" / "model_signing"


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MODEL_SIGNING:
        return Path(MODEL_SIGNING)
    return installed(tmp_path_factory.mktemp("model-signing") / "venv")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An unpacked package: files at the top and below it, also with names to be escaped."""
    folder = tmp_path / "my model"
    shutil.copytree(MODEL, folder)
    (folder / "sub" / "größe ‰.txt").write_text("non-ascii name")
    (folder / ".hidden").write_text("a file with a dot")
    return folder


def files_of(folder: Path) -> list[FileDigest]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "model.sig"]
    return [FileDigest(path.relative_to(folder).as_posix(), *hash_file(path)) for path in paths]


def sign(folder: Path, key: PrivateKey) -> None:
    data = sign_files(files_of(folder), name="acme/sql@1.0.0", key=key)
    (folder / "model.sig").write_bytes(data)


def verify(tool: Path, folder: Path, key: PrivateKey) -> subprocess.CompletedProcess[str]:
    public = folder.parent / "key.pub.pem"
    public.write_bytes(key.public.pem())
    signature = str(folder / "model.sig")
    command = [str(tool), "verify", "key", "--signature", signature, "--public_key", str(public)]
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)


def test_the_tool_accepts_what_we_sign(tool: Path, model: Path) -> None:
    key = PrivateKey.generate()
    sign(model, key)
    result = verify(tool, model, key)
    assert (result.returncode, result.stdout) == (0, "Verification succeeded\n"), result.stderr


def test_the_tool_accepts_an_unpacked_package(tool: Path, tmp_path: Path) -> None:
    key = PrivateKey.generate()
    package = make_package(tmp_path, base_dir=write_base(tmp_path / "base"), key=key)
    assert app.run(["unpack", str(package), str(tmp_path / "unpacked")]) == 0
    result = verify(tool, tmp_path / "unpacked", key)
    assert (result.returncode, result.stdout) == (0, "Verification succeeded\n"), result.stderr
    with (tmp_path / "unpacked" / "expert.json").open("ab") as stream:
        stream.write(b" ")
    assert verify(tool, tmp_path / "unpacked", key).returncode != 0


def test_the_tool_accepts_it_from_inside_the_folder(tool: Path, model: Path) -> None:
    key = PrivateKey.generate()
    sign(model, key)
    (model.parent / "key.pem").write_bytes(key.public.pem())
    command = [str(tool), "verify", "key", "--signature", "model.sig"]
    result = subprocess.run(
        [*command, "--public_key", "../key.pem", "."],
        cwd=model,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("change", ["byte", "extra", "missing", "renamed"])
def test_the_tool_refuses_what_was_changed_after_signing(
    tool: Path, model: Path, change: str
) -> None:
    key = PrivateKey.generate()
    sign(model, key)
    weights = model / "adapter_model.safetensors"
    match change:
        case "byte":
            data = bytearray(weights.read_bytes())
            data[17] ^= 1
            weights.write_bytes(data)
        case "extra":
            (model / "payload.py").write_text("")
        case "missing":
            weights.unlink()
        case _:
            weights.rename(model / "other.safetensors")
    result = verify(tool, model, key)
    assert result.returncode == 1
    assert "Signature mismatch" in result.stderr
    bundle = read_bundle((model / "model.sig").read_bytes())
    with pytest.raises(SignatureError, match="does not fit"):
        verify_bundle(bundle, files_of(model), key.public)


def test_the_tool_refuses_another_key(tool: Path, model: Path) -> None:
    sign(model, PrivateKey.generate())
    result = verify(tool, model, PrivateKey.generate())
    assert result.returncode == 1
    assert "Key mismatch" in result.stderr


def test_we_accept_what_the_tool_signs_with_the_lower_s(tool: Path, model: Path) -> None:
    key = PrivateKey.generate()
    secret = model.parent / "key.pem"
    secret.write_bytes(key.pem())
    signature = str(model / "model.sig")
    command = [str(tool), "sign", "key", "--private_key", str(secret), "--signature", signature]
    for _ in range(40):  # each signature has the lower s by a toss of a coin
        subprocess.run([*command, str(model)], capture_output=True, check=True)
        bundle = read_bundle((model / "model.sig").read_bytes())
        try:
            verify_bundle(bundle, files_of(model), key.public)
        except SignatureError as error:
            reason = error.message
        else:
            return
        assert "higher s" in reason
    pytest.fail("no lower s in forty signatures")
