"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    _audit()
    _blobs()
    _manifest_links()
    _namespaces()
    _users()
    _members()
    _namespace_keys()
    _packages()
    _repositories()
    _tokens()
    _manifests()
    _releases()
    _repository_blobs()
    _tags()
    _uploads()
    _signed_forms()


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=True),
        sa.Column("token_id", sa.String(length=32), nullable=True),
        sa.Column("address", sa.String(length=64), nullable=True),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=400), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_time"), "audit", ["time"], unique=False)


def _blobs() -> None:
    op.create_table(
        "blobs",
        sa.Column("digest", sa.String(length=135), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blobs")),
    )


def _manifest_links() -> None:
    op.create_table(
        "manifest_links",
        sa.Column("repository_id", sa.Integer(), nullable=False),
        sa.Column("manifest", sa.String(length=135), nullable=False),
        sa.Column("digest", sa.String(length=135), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.CheckConstraint("kind IN ('blob', 'manifest')", name=op.f("ck_manifest_links_kind")),
        sa.PrimaryKeyConstraint(
            "repository_id", "manifest", "digest", name=op.f("pk_manifest_links")
        ),
    )
    op.create_index(
        "ix_manifest_links_repository_id_digest",
        "manifest_links",
        ["repository_id", "digest"],
        unique=False,
    )


def _namespaces() -> None:
    op.create_table(
        "namespaces",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("skeleton", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("read", sa.String(length=8), nullable=False),
        sa.Column("quota", sa.Integer(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("kind IN ('expert', 'oci')", name=op.f("ck_namespaces_kind")),
        sa.CheckConstraint("read IN ('public', 'token')", name=op.f("ck_namespaces_read")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_namespaces")),
        sa.UniqueConstraint("name", name=op.f("uq_namespaces_name")),
    )
    op.create_index(op.f("ix_namespaces_skeleton"), "namespaces", ["skeleton"], unique=False)


def _users() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("removed", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )


def _members() -> None:
    op.create_table(
        "members",
        sa.Column("namespace_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.CheckConstraint("role IN ('owner', 'publisher')", name=op.f("ck_members_role")),
        sa.ForeignKeyConstraint(
            ["namespace_id"], ["namespaces.id"], name=op.f("fk_members_namespace_id_namespaces")
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_members_user_id_users")),
        sa.PrimaryKeyConstraint("namespace_id", "user_id", name=op.f("pk_members")),
    )
    op.create_index(op.f("ix_members_user_id"), "members", ["user_id"], unique=False)


def _namespace_keys() -> None:
    op.create_table(
        "namespace_keys",
        sa.Column("namespace_id", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(length=71), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=True),
        sa.Column("added", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.ForeignKeyConstraint(
            ["namespace_id"],
            ["namespaces.id"],
            name=op.f("fk_namespace_keys_namespace_id_namespaces"),
        ),
        sa.PrimaryKeyConstraint("namespace_id", "key_id", name=op.f("pk_namespace_keys")),
    )


def _packages() -> None:
    op.create_table(
        "packages",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("namespace_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("skeleton", sa.String(length=64), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("index_document", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.Column("latest", sa.String(length=256), nullable=True),
        sa.Column("search_text", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["namespace_id"], ["namespaces.id"], name=op.f("fk_packages_namespace_id_namespaces")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_packages")),
        sa.UniqueConstraint("namespace_id", "name", name=op.f("uq_packages_namespace_id_name")),
    )
    op.create_index(op.f("ix_packages_namespace_id"), "packages", ["namespace_id"], unique=False)
    op.create_index(
        "ix_packages_search",
        "packages",
        ["namespace_id", "latest", "search_text", "name"],
        unique=False,
    )


def _repositories() -> None:
    op.create_table(
        "repositories",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("namespace_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["namespace_id"],
            ["namespaces.id"],
            name=op.f("fk_repositories_namespace_id_namespaces"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_repositories")),
        sa.UniqueConstraint("name", name=op.f("uq_repositories_name")),
    )
    op.create_index(
        op.f("ix_repositories_namespace_id"), "repositories", ["namespace_id"], unique=False
    )


def _tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.Column("last_used", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_tokens_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
    )
    op.create_index(op.f("ix_tokens_user_id"), "tokens", ["user_id"], unique=False)


def _manifests() -> None:
    op.create_table(
        "manifests",
        sa.Column("repository_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=135), nullable=False),
        sa.Column("media_type", sa.String(length=255), nullable=False),
        sa.Column("artifact_type", sa.String(length=255), nullable=True),
        sa.Column("subject", sa.String(length=135), nullable=True),
        sa.Column("annotations", sa.Text(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["repository_id"],
            ["repositories.id"],
            name=op.f("fk_manifests_repository_id_repositories"),
        ),
        sa.PrimaryKeyConstraint("repository_id", "digest", name=op.f("pk_manifests")),
    )
    op.create_index(
        "ix_manifests_repository_id_subject",
        "manifests",
        ["repository_id", "subject"],
        unique=False,
    )


def _releases() -> None:
    op.create_table(
        "releases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("package_id", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(length=256), nullable=False),
        sa.Column("content_digest", sa.String(length=71), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("published", sa.Float(), nullable=False),
        sa.Column("publisher", sa.Integer(), nullable=True),
        sa.Column("yanked", sa.Float(), nullable=True),
        sa.Column("yank_reason", sa.String(length=500), nullable=True),
        sa.Column("downloads", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["package_id"], ["packages.id"], name=op.f("fk_releases_package_id_packages")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_releases")),
        sa.UniqueConstraint("package_id", "version", name=op.f("uq_releases_package_id_version")),
    )
    op.create_index("ix_releases_downloads", "releases", ["package_id", "downloads"], unique=False)


def _repository_blobs() -> None:
    op.create_table(
        "repository_blobs",
        sa.Column("repository_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=135), nullable=False),
        sa.Column("added", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["digest"], ["blobs.digest"], name=op.f("fk_repository_blobs_digest_blobs")
        ),
        sa.ForeignKeyConstraint(
            ["repository_id"],
            ["repositories.id"],
            name=op.f("fk_repository_blobs_repository_id_repositories"),
        ),
        sa.PrimaryKeyConstraint("repository_id", "digest", name=op.f("pk_repository_blobs")),
    )
    op.create_index(
        op.f("ix_repository_blobs_digest"), "repository_blobs", ["digest"], unique=False
    )


def _tags() -> None:
    op.create_table(
        "tags",
        sa.Column("repository_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=135), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["repository_id"], ["repositories.id"], name=op.f("fk_tags_repository_id_repositories")
        ),
        sa.PrimaryKeyConstraint("repository_id", "name", name=op.f("pk_tags")),
    )


def _uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("repository_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["repository_id"],
            ["repositories.id"],
            name=op.f("fk_uploads_repository_id_repositories"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_repository_id"), "uploads", ["repository_id"], unique=False)


def _signed_forms() -> None:
    op.create_table(
        "signed_forms",
        sa.Column("release_id", sa.Integer(), nullable=False),
        sa.Column("package_digest", sa.String(length=71), nullable=False),
        sa.Column("signer", sa.String(length=71), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("published", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["release_id"], ["releases.id"], name=op.f("fk_signed_forms_release_id_releases")
        ),
        sa.PrimaryKeyConstraint("release_id", "package_digest", name=op.f("pk_signed_forms")),
        sa.UniqueConstraint(
            "release_id", "position", name=op.f("uq_signed_forms_release_id_position")
        ),
    )
