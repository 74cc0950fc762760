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
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.trust.keys import PrivateKey
from tests.package.forged_packages import read_archive

OTHER_ZSTANDARD = "0.23.0"
PROGRAM = """
import sys, zstandard
from pathlib import Path
from expertctl.package import frame
from expertctl.package.read import read_package
from expertctl.package.write import spool_package
from expertctl.package.write import write_oci_archive
with open(sys.argv[1], "rb") as tar, open(sys.argv[2], "wb") as out:
    data = tar.read()
    with frame.open_compressor(out, content_size=len(data)) as writer:
        writer.write(data)
contents = read_package(Path(sys.argv[2]))
tar = Path(sys.argv[2] + ".tar")
with spool_package(Path(sys.argv[3]), target=tar) as (told, spool):
    write_oci_archive(tar, told.layout, spool.blob)
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
        build_package(
            plan_build(source, ManifestOverrides(), base=facts), tmp_path / f"{i}.expert", key=key
        )
        for i, source in enumerate((lora, elsewhere, lora))
    ]
    assert len({(r.content_digest, r.package_digest) for r in results}) == 1
    assert len({read_archive(r.path) for r in results}) == 1


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
    ours = build_package(
        plan_build(lora, ManifestOverrides(), base=facts), tmp_path / "ours.expert", key=key
    )
    (tmp_path / "ours.tar").write_bytes(read_archive(ours.path))
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
    assert read_archive(tmp_path / "theirs.expert") == read_archive(ours.path)
    exported = Path(f"{tmp_path / 'theirs.expert'}.tar").read_bytes()
    assert exported == read_archive(ours.path)
