"""Packages: finding them, what there is of one, what is in a version, and taking one back."""

from sqlalchemy import func, select

from expertctl.reference import PackageName
from registry_server.access import rights
from registry_server.api.namespaces import ReasonWish
from registry_server.api.operation import Context, Operation
from registry_server.api.package_pages import (
    PackagePage,
    VersionPage,
    package_page,
    version_page,
)
from registry_server.api.search import SearchPage, SearchQuery, find_packages
from registry_server.api.wire import Input, Name, Output, VersionText
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES
from registry_server.publishing import yank


class PackagePath(Input, frozen=True):
    """Which package."""

    namespace: Name
    name: Name

    @property
    def package(self) -> PackageName:
        """The name as one value."""
        return PackageName(self.namespace, self.name)


class VersionPath(PackagePath, frozen=True):
    """Which version of which package."""

    version: VersionText


class Stats(Output, frozen=True):
    """What there is, in the namespaces that one may read; ``bytes`` is the sum of all versions."""

    namespaces: int
    packages: int
    versions: int
    bytes: int
    downloads: int


def search(context: Context, query: SearchQuery) -> SearchPage:
    """Find packages by words of their names, descriptions, tasks and keywords."""
    with context.registry.database.read() as connection:
        return find_packages(connection, context.identity, query)


def show_package(context: Context, path: PackagePath) -> PackagePage:
    """Show a package with all its versions, the newest first."""
    with context.registry.database.read() as connection:
        return package_page(connection, context.identity, path.package)


def show_version(context: Context, path: VersionPath) -> VersionPage:
    """Show a version, its manifest and its files."""
    with context.registry.database.read() as connection:
        return version_page(connection, context.identity, path.package, path.version)


def yank_version(context: Context, path: VersionPath, body: ReasonWish) -> None:
    """Yank a version: it is chosen no more, though who has locked it still gets it."""
    yank.yank(
        context.registry,
        context.identity,
        name=path.package,
        version=path.version,
        reason=body.reason,
    )


def unyank_version(context: Context, path: VersionPath) -> None:
    """Take a yank back."""
    yank.unyank(context.registry, context.identity, name=path.package, version=path.version)


def stats(context: Context) -> Stats:
    """Count what there is, what of it was downloaded, and how large it is."""
    own = select(NAMESPACES.c.id).where(rights.readable(context.identity))
    packages = select(PACKAGES.c.id).where(PACKAGES.c.namespace_id.in_(own))
    versions = select(
        func.count(),
        func.coalesce(func.sum(RELEASES.c.size), 0),
        func.coalesce(func.sum(RELEASES.c.downloads), 0),
    ).where(RELEASES.c.package_id.in_(packages))
    with context.registry.database.read() as connection:
        spaces = connection.scalar(select(func.count()).select_from(own.subquery())) or 0
        known = connection.scalar(select(func.count()).select_from(packages.subquery())) or 0
        count, size, downloads = connection.execute(versions).one()
    return Stats(spaces, known, count, size, downloads)


_ONE = "/api/v1/packages/{namespace}/{name}"
_VERSION = f"{_ONE}/{{version}}"
OPERATIONS = (
    Operation("GET", "/api/v1/search", search, "packages", anonymous=True),
    Operation("GET", _ONE, show_package, "packages", 200, (403, 404), anonymous=True),
    Operation("GET", _VERSION, show_version, "packages", 200, (403, 404), anonymous=True),
    Operation("PUT", f"{_VERSION}/yank", yank_version, "packages", 204, (403, 404)),
    Operation("DELETE", f"{_VERSION}/yank", unyank_version, "packages", 204, (403, 404)),
    Operation("GET", "/api/v1/stats", stats, "registry", anonymous=True),
)
