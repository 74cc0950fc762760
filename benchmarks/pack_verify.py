"""The time to verify and to install a package, against the minimum work of any such tool.

Installing ends with the files in the store. The catalogue and the routing vectors are excluded:
they are made from texts that are small compared with the files.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zstandard

from benchmarks.harness import Row, compare, main, time_action
from benchmarks.inputs import write_lora, write_package
from expertctl.install.installer import InstallContext, install_files
from expertctl.package.read import read_package, verify_contents
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore


def measure(rounds: int) -> Sequence[Row]:
    """Verify and install a signed 40 MB LoRA; the files are in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        key = PrivateKey.generate("ecdsa-p256")
        package = root / "bench.expert"
        write_package(write_lora(root / "lora"), package, name="bench/lora", key=key)
        trust = TrustStore(root / "trust.json")
        trust.add(key.public, name="bench", namespaces=["bench"])
        content = _decompress(package)
        return [
            compare(
                f"verify, {len(content) / 1e6:.0f} MB",
                time_action(lambda: verify_contents(read_package(package), trust)),
                time_action(lambda: hashlib.sha256(content).digest()),
                rival="hashlib.sha256 of the bytes",
                rounds=rounds,
                target="<= 1.3",
            ),
            compare(
                f"install, {len(content) / 1e6:.0f} MB",
                time_action(lambda: _install(package, trust, root / "home")),
                time_action(lambda: _do_least_work(package, root / "copy")),
                rival="zstd decompress + sha256 + write + fsync",
                rounds=rounds,
                target="<= 1.5",
            ),
        ]


def _install(package: Path, trust: TrustStore, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    home = Home(root)
    context = InstallContext(Store(home.store), BaseStore(home.bases), trust, home.registries)
    install_files([package], context)


def _do_least_work(package: Path, target: Path) -> None:
    """Decompress, hash, write and flush, one after the other, in the fewest calls."""
    data = _decompress(package)
    hashlib.sha256(data).digest()
    with target.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _decompress(package: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompress(package.read_bytes())


if __name__ == "__main__":
    main("pack_verify", measure, rounds=9)
