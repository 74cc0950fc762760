"""The tables of ``registry.db``: users and rights, blobs and manifests, packages and releases.

Times are seconds since the epoch. Digests are text, ``sha256:…`` or ``sha512:…``. Names are never
reused: rows of users, namespaces and packages are marked as removed, not deleted.

`current_revision` reads the revision of a database without loading alembic.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _id_column() -> Column[int]:
    return Column("id", Integer, primary_key=True)


USERS = Table(
    "users",
    METADATA,
    _id_column(),
    Column("name", String(64), nullable=False, unique=True),
    Column("admin", Boolean, nullable=False, default=False),
    Column("created", Float, nullable=False),
    Column("removed", Float),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("user_id", ForeignKey("users.id"), nullable=False, index=True),
    Column("name", String(100), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("scopes", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
    Column("last_used", Float),
)
"""``hash`` is the hex sha256 of the secret, which has 256 bits; ``scopes`` is a JSON list."""

BROWSER_SESSIONS = Table(
    "browser_sessions",
    METADATA,
    Column("hash", String(64), primary_key=True),
    Column("token_id", ForeignKey("tokens.id"), nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False, index=True),
)
"""Logins of the web pages; ``hash`` is the hex sha256 of the value of the cookie."""

NAMESPACES = Table(
    "namespaces",
    METADATA,
    _id_column(),
    Column("name", String(64), nullable=False, unique=True),
    Column("skeleton", String(64), nullable=False, index=True),
    Column("kind", String(8), nullable=False),
    Column("read", String(8), nullable=False),
    Column("quota", Integer),
    Column("created", Float, nullable=False),
    Column("used", Integer, nullable=False, server_default="0"),
    CheckConstraint("kind IN ('expert', 'oci')", name="kind"),
    CheckConstraint("read IN ('public', 'token')", name="read"),
)
"""``fold_name`` is the name with look-alike characters folded; ``quota`` in bytes, null: default.

``used`` is the number of bytes that count against the quota; only database triggers write it.
"""

MEMBERS = Table(
    "members",
    METADATA,
    Column("namespace_id", ForeignKey("namespaces.id"), primary_key=True),
    Column("user_id", ForeignKey("users.id"), primary_key=True, index=True),
    Column("role", String(16), nullable=False),
    CheckConstraint("role IN ('owner', 'publisher')", name="role"),
)

NAMESPACE_KEYS = Table(
    "namespace_keys",
    METADATA,
    Column("namespace_id", ForeignKey("namespaces.id"), primary_key=True),
    Column("key_id", String(71), primary_key=True),
    Column("public_key", Text, nullable=False),
    Column("statement", LargeBinary),
    Column("added", Float, nullable=False),
    Column("revoked", Float),
    Column("reason", String(500), nullable=False, default=""),
)
"""``statement`` is the DSSE envelope in which an older key of the namespace endorses this one."""

REPOSITORIES = Table(
    "repositories",
    METADATA,
    _id_column(),
    Column("namespace_id", ForeignKey("namespaces.id"), nullable=False, index=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("created", Float, nullable=False),
)
"""``name`` is the full OCI name, ``namespace/…``."""

BLOBS = Table(
    "blobs",
    METADATA,
    Column("digest", String(135), primary_key=True),
    Column("size", Integer, nullable=False),
    Column("created", Float, nullable=False),
)
"""The blobs in the storage."""

REPOSITORY_BLOBS = Table(
    "repository_blobs",
    METADATA,
    Column("repository_id", ForeignKey("repositories.id"), primary_key=True),
    Column("digest", ForeignKey("blobs.digest"), primary_key=True, index=True),
    Column("added", Float, nullable=False),
)
"""The repositories through which a blob can be read; new links are kept without a manifest.
"""

MANIFESTS = Table(
    "manifests",
    METADATA,
    Column("repository_id", ForeignKey("repositories.id"), primary_key=True),
    Column("digest", String(135), primary_key=True),
    Column("media_type", String(255), nullable=False),
    Column("artifact_type", String(255)),
    Column("subject", String(135)),
    Column("annotations", Text),
    Column("size", Integer, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("created", Float, nullable=False),
    Index("ix_manifests_repository_id_subject", "repository_id", "subject"),
)

MANIFEST_LINKS = Table(
    "manifest_links",
    METADATA,
    Column("repository_id", Integer, primary_key=True),
    Column("manifest", String(135), primary_key=True),
    Column("digest", String(135), primary_key=True),
    Column("kind", String(8), nullable=False),
    Index("ix_manifest_links_repository_id_digest", "repository_id", "digest"),
    CheckConstraint("kind IN ('blob', 'manifest')", name="kind"),
)
"""The digests in a manifest: its config and layers, or the manifests of an index."""

TAGS = Table(
    "tags",
    METADATA,
    Column("repository_id", ForeignKey("repositories.id"), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("digest", String(135), nullable=False),
    Column("updated", Float, nullable=False),
)

UPLOADS = Table(
    "uploads",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("repository_id", ForeignKey("repositories.id"), nullable=False, index=True),
    Column("user_id", Integer),
    Column("size", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
)
"""Blob uploads in progress; ``size`` is the bytes received, which count against the quota."""

PACKAGES = Table(
    "packages",
    METADATA,
    _id_column(),
    Column("namespace_id", ForeignKey("namespaces.id"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("skeleton", String(64), nullable=False),
    Column("description", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("index_document", LargeBinary, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Column("signed", Float, nullable=False, index=True, server_default="0"),
    Column("latest", String(256)),
    Column("search_text", Text, nullable=False, server_default=""),
    Column("base", String(200), nullable=False, server_default=""),
    Column("kinds", String(100), nullable=False, server_default=""),
    UniqueConstraint("namespace_id", "name"),
    Index("ix_packages_search", "namespace_id", "latest", "base", "kinds", "search_text", "name"),
)
"""``index_document`` is the signed envelope, ``revision`` its version number, ``signed`` its time;
``updated`` is when the package itself changed.

``latest`` is the leading version of the package, null if all are yanked; ``search_text`` contains
the words that searches match, folded to lower case, with one space between them. ``base`` is the
name of the base model and ``kinds`` has the kinds of the adapters, each between single spaces, both
of the leading version.
"""

RELEASES = Table(
    "releases",
    METADATA,
    _id_column(),
    Column("package_id", ForeignKey("packages.id"), nullable=False),
    Column("version", String(256), nullable=False),
    Column("content_digest", String(71), nullable=False),
    Column("manifest", LargeBinary, nullable=False),
    Column("size", Integer, nullable=False),
    Column("published", Float, nullable=False),
    Column("publisher", Integer),
    Column("yanked", Float),
    Column("yank_reason", String(500)),
    Column("downloads", Integer, nullable=False, default=0),
    UniqueConstraint("package_id", "version"),
    Index("ix_releases_downloads", "package_id", "downloads"),
)
"""The versions of packages; ``manifest`` is ``expert.json``."""

SIGNED_FORMS = Table(
    "signed_forms",
    METADATA,
    Column("release_id", ForeignKey("releases.id"), primary_key=True),
    Column("package_digest", String(71), primary_key=True),
    Column("signer", String(71), nullable=False),
    Column("size", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("published", Float, nullable=False),
    UniqueConstraint("release_id", "position"),
)
"""The package digests of a version. The one with the highest ``position`` is in effect; older ones
can still be pulled. ``size`` is that of the OCI manifest."""

AUDIT = Table(
    "audit",
    METADATA,
    _id_column(),
    Column("time", Float, nullable=False, index=True),
    Column("actor", String(64)),
    Column("token_id", String(32)),
    Column("address", String(64)),
    Column("action", String(64), nullable=False),
    Column("target", String(400), nullable=False),
    Column("detail", Text, nullable=False, default=""),
)


HEAD = "0004"
"""The last revision in ``migrations/versions``."""


def current_revision(connection: Connection) -> str | None:
    """Return the revision of a database; None if it is empty."""
    known = text("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'")
    if connection.execute(known).first() is None:
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found
