"""The starter pack: a small base and experts that ship in the wheel, for a first run.

They are installed like any package: the base is added, the experts are verified. The key that
signed them was made for that, used once and thrown away; its public half is trusted for the content
digests that ``starter.json`` pins, and for nothing else.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from expertctl.errors import DigestError, InvalidPackageError
from expertctl.install.installer import InstallContext, install_files
from expertctl.install.publication import InstalledPackage
from expertctl.package.base_model import BaseIdentity
from expertctl.reference import Progress, ignore_progress
from expertctl.routing.base_choice import STARTER_NAMESPACE
from expertctl.schema.validation import decode_json
from expertctl.trust.keys import PublicKey

STARTER = Path(__file__).parent.parent / "_starter"
STARTER_MANIFEST = "starter.json"


@dataclass(frozen=True, slots=True)
class StarterBase:
    """The digests that the base must have."""

    name: str
    arch: str
    weights: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class StarterManifest:
    """``starter.json``: the content of the pack; ``experts`` maps a file to its content digest."""

    base: StarterBase
    public_key: str
    experts: dict[str, str]


def read_starter_manifest() -> StarterManifest:
    """Read the pinned digests of the wheel.

    Raises:
        InvalidPackageError: when the installation is damaged.
    """
    path = STARTER / STARTER_MANIFEST
    try:
        return decode_json(path.read_bytes(), StarterManifest)
    except (OSError, msgspec.MsgspecError) as error:
        hint = "install expertctl again"
        raise InvalidPackageError(str(path), [f"cannot be read: {error}"], hint=hint) from error


def install_starter(
    context: InstallContext, *, progress: Progress = ignore_progress
) -> list[InstalledPackage]:
    """Add the base and install the experts of the starter pack; repeating this is harmless.

    Raises:
        InvalidPackageError: when the installation is damaged.
        DigestError: when the base is not the pinned one.
        StoreError: when the home cannot be written.
    """
    pins = read_starter_manifest()
    base = context.bases.add_copy(STARTER / "base", name=pins.base.name, progress=progress)
    _check_identity(base.identity, pins.base)
    context.trust.add(
        PublicKey.from_pem(pins.public_key.encode()),
        name="starter-pack",
        namespaces=[STARTER_NAMESPACE],
        content_digests=sorted(pins.experts.values()),
    )
    experts = [STARTER / name for name in sorted(pins.experts)]
    return install_files(experts, context, progress=progress)


def _check_identity(identity: BaseIdentity, pin: StarterBase) -> None:
    found = {
        "arch": str(identity.arch),
        "weights": str(identity.weights),
        "tokenizer": str(identity.tokenizer),
    }
    for field, value in found.items():
        if value != getattr(pin, field):
            raise DigestError(
                f"the starter base has {field} {value}, pinned is {getattr(pin, field)}",
                hint="install expertctl again",
            )
