"""What refers to a manifest: signatures, attestations, whatever names it as its subject.

An index that a client pushed under the tag ``sha256-<hex>``, for registries without this list, is
an ordinary tag here.
"""

import json
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from registry_server.database.tables import MANIFESTS

MAX_ENTRIES = 500
MAX_BYTES = 4 << 20
"""Of the annotations of one page: a client reads no larger index."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the referrers, in the order of their digests."""

    descriptors: list[dict[str, object]]
    next: str | None
    """The digest behind which the next page begins, None on the last one."""


def page(
    connection: Connection,
    repository_id: int,
    *,
    subject: str,
    artifact_type: str | None,
    after: str,
) -> Page:
    """Return the referrers of a digest behind ``after``, perhaps of one artifact type only."""
    table = MANIFESTS.c
    query = (
        select(table.digest, table.media_type, table.size, table.artifact_type, table.annotations)
        .where(table.repository_id == repository_id, table.subject == subject)
        .where(table.digest > after)
        .order_by(table.digest)
        .limit(MAX_ENTRIES + 1)
    )
    if artifact_type is not None:
        query = query.where(func.coalesce(table.artifact_type, "") == artifact_type)
    shown: list[dict[str, object]] = []
    size = 0
    for digest, media_type, length, kind, annotations in connection.execute(query):
        size += len(annotations or "") + 512
        if shown and (size > MAX_BYTES or len(shown) == MAX_ENTRIES):
            return Page(shown, str(shown[-1]["digest"]))
        shown.append(_descriptor(digest, media_type, length, kind, annotations))
    return Page(shown, None)


def _descriptor(
    digest: str, media_type: str, size: int, artifact_type: str | None, annotations: str | None
) -> dict[str, object]:
    entry: dict[str, object] = {"mediaType": media_type, "digest": digest, "size": size}
    if artifact_type is not None:
        entry["artifactType"] = artifact_type
    if annotations is not None:
        entry["annotations"] = json.loads(annotations)
    return entry
