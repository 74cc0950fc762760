"""What one source says a version contains, and the error for two that disagree.

A version of a package never changes its content. Where a lock file, an earlier answer of a registry
or an installed version says otherwise than the registry does now, somebody is wrong or lies.
"""

from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import ChangedVersionError

ACCEPT = "--accept-changed"


@dataclass(frozen=True, slots=True)
class VersionContent:
    """The content digest of a version, who says so, and which keys signed it."""

    source: str
    digest: Digest
    signers: tuple[str, ...] = ()
    """Key ids; none where the source does not record them, or nobody signed."""

    def __str__(self) -> str:
        """Return it as a clause of a message."""
        signed = f"signed by {' and '.join(self.signers)}" if self.signers else "signer unknown"
        return f"{self.source} has {self.digest} ({signed})"


def changed_version(
    ref: str, before: VersionContent, now: VersionContent, *, way_out: str = ""
) -> ChangedVersionError:
    """Return the error for a version that has another content than before."""
    override = f"`{ACCEPT} {ref}` takes the new content, if the publisher confirms it"
    return ChangedVersionError(
        f"{ref} has another content than before: {before}, but {now}",
        hint=f"a version never changes its content, so ask its publisher; {way_out or override}",
    )
