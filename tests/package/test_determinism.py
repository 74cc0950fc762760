"""The same input gives the same digests: twice, elsewhere, later, with another zstandard."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import zstandard

from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build, plan_build
from expertctl.package.draft import Overrides
from expertctl.trust.keys import PrivateKey
from tests.package.forge import tar_of

OTHER_ZSTANDARD = "0.23.0"
PROGRAM = """
import sys, zstandard
from pathlib import Path
from expertctl.package import frame
from expertctl.package.read import read_package
from expertctl.package.spool import spooling
from expertctl.package.write import export_archive
with open(sys.argv[1], "rb") as tar, open(sys.argv[2], "wb") as out:
    data = tar.read()
    with frame.compressing(out, content_size=len(data)) as writer:
        writer.write(data)
contents = read_package(Path(sys.argv[2]))
tar = Path(sys.argv[2] + ".tar")
with spooling(Path(sys.argv[3]), beside=tar) as (told, spool):
    export_archive(tar, told.layout, spool.blob)
print(zstandard.__version__, contents.content_digest, contents.package_digest)
"""


def test_building_twice_and_elsewhere_gives_the_same_bytes(
    lora: Path, facts: BaseFacts, key: PrivateKey, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    elsewhere = Path(shutil.copytree(lora, tmp_path / "b" / lora.name))
    for path in elsewhere.iterdir():
        path.chmod(0o600)
        os.utime(path, (1, 1))
    results = [
        build(plan_build(source, Overrides(), base=facts), tmp_path / f"{i}.expert", key=key)
        for i, source in enumerate((lora, elsewhere, lora))
    ]
    assert len({(r.content_digest, r.package_digest) for r in results}) == 1
    assert len({tar_of(r.path) for r in results}) == 1


@pytest.mark.all
def test_another_zstandard_gives_the_same_digests_and_reads_ours(
    lora: Path, facts: BaseFacts, key: PrivateKey, tmp_path: Path
) -> None:
    """The other version sits before ours on the path; everything else is the same."""
    environment = tmp_path / "other"
    venv.create(environment, with_pip=True)
    subprocess.run(
        [
            environment / "bin" / "python", "-m", "pip", "install", "--quiet",
            "--target", tmp_path / "site", "--no-deps", f"zstandard=={OTHER_ZSTANDARD}",
        ],
        check=True,
    )  # fmt: skip
    ours = build(plan_build(lora, Overrides(), base=facts), tmp_path / "ours.expert", key=key)
    (tmp_path / "ours.tar").write_bytes(tar_of(ours.path))
    result = subprocess.run(
        [
            sys.executable, "-c", PROGRAM,
            tmp_path / "ours.tar", tmp_path / "theirs.expert", ours.path,
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{Path.cwd()}"},
        check=True,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.stdout.split() == [
        OTHER_ZSTANDARD,
        str(ours.content_digest),
        str(ours.package_digest),
    ]
    assert zstandard.__version__ != OTHER_ZSTANDARD
    assert tar_of(tmp_path / "theirs.expert") == tar_of(ours.path)
    exported = Path(f"{tmp_path / 'theirs.expert'}.tar").read_bytes()
    assert exported == tar_of(ours.path)
