"""`ApiClient` for ``/api/v1`` of an expertctl registry, and its answers about packages as types.

Unknown fields are ignored, so that a newer registry can say more. Text is kept as received; the
code that shows it makes it harmless. What a registry says here about packages is for people
(``search``, ``info``) and never a base for trust: install trusts the signed index document alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from expertctl.errors import (
    ExpertError,
    InvalidPackageError,
    OfflineError,
    RateLimitError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
)
from expertctl.reference import Digest, PackageName, Version
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import RegistryHttp, RegistryRequest, RegistryResponse
from expertctl.schema.manifest import BaseRequirement
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object
from expertctl.schema.validation import convert_document
from expertctl.trust.trust_record import TrustRecord

API_ROOT = "/api/v1/"
MAX_ANSWER = 16 << 20
_SUCCESS = frozenset({200, 201, 202, 204})


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Sends requests to one registry; paths are relative to ``/api/v1/``.

    Every method raises the error that the answer means: `NotFoundError`, `ForbiddenError`,
    `ConflictError`, `RegistryError` where it is not understood.
    """

    http: RegistryHttp
    address: RegistryAddress

    def get(self, path: str) -> JsonObject:
        """Return a resource."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Create a resource; sent again only when the request cannot have arrived."""
        return self._request("POST", path, body)

    def put(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Set a resource."""
        return self._request("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Change a resource."""
        return self._request("PATCH", path, body)

    def delete(self, path: str, body: Mapping[str, JsonValue] | None = None) -> JsonObject:
        """Remove a resource."""
        return self._request("DELETE", path, body)

    def _request(self, method: str, path: str, body: Mapping[str, JsonValue] | None) -> JsonObject:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else encode_canonical(dict(body))
        call = RegistryRequest(
            method, self.address, API_ROOT + path.lstrip("/"), headers=headers, body=data
        )
        answer = self.http.request(call, max_bytes=MAX_ANSWER, accept=_SUCCESS)
        return {} if not answer.body else self._parse_object(answer, call)

    def _parse_object(self, answer: RegistryResponse, call: RegistryRequest) -> JsonObject:
        try:
            return load_object(answer.body, what=call.what, max_bytes=MAX_ANSWER)
        except InvalidPackageError as error:
            raise RegistryError(
                f"{self.address.host}: {call.what}: the answer is not JSON of an expertctl "
                "registry",
                hint="is that the address of an expertctl registry?",
            ) from error


MAX_PAGES = 1000
PAGE_SIZE = 100

AnswerType = TypeVar("AnswerType")


class ResultPage(Protocol):
    """A part of a list; ``next`` is the cursor of the following part."""

    @property
    def next(self) -> str | None:
        """The cursor of the following part; None at the end."""
        ...


PageType = TypeVar("PageType", bound=ResultPage)


def parse_answer(document: JsonObject, kind: type[AnswerType], *, host: str) -> AnswerType:
    """Convert an answer to a value of ``kind``.

    Raises:
        RegistryError: when it has another form.
    """
    try:
        return convert_document(document, kind)
    except msgspec.ValidationError as error:
        message = f"{host} sent an unexpected answer: {error}"
        hint = f"is {host} a registry of this kind, and of a version that fits?"
        raise RegistryError(message, hint=hint) from error


def has_expert_api(api: ApiClient) -> bool:
    """Tell whether a registry has our API; other OCI registries do not.

    Raises:
        RegistryError: when it cannot be asked.
    """
    try:
        return "index_key" in api.get("")
    except (OfflineError, RateLimitError, UnauthenticatedError, UnreachableError):
        raise
    except ExpertError:
        return False


def iterate_pages(api: ApiClient, path: str, kind: type[PageType]) -> Iterator[PageType]:
    """Read a list page by page.

    Raises:
        RegistryError: when a page has another form, or the list never ends.
    """
    wanted = {"limit": str(PAGE_SIZE)}
    for _ in range(MAX_PAGES):
        page = parse_answer(api.get(f"{path}?{urlencode(wanted)}"), kind, host=api.address.host)
        yield page
        if page.next is None:
            return
        wanted["cursor"] = page.next
    raise RegistryError(f"{api.address.host}: the list of {path} never ends")


@dataclass(frozen=True, slots=True)
class PackageHit:
    """A package that a search found, described by its newest version."""

    name: str
    version: str
    description: str = ""
    task: str = ""
    kinds: tuple[str, ...] = ()
    base: str = ""
    downloads: int = 0
    updated: str = ""
    signer: str | None = None
    revoked: str | None = None
    """The reason why every key that signed it was revoked, if they were."""


@dataclass(frozen=True, slots=True)
class PackageHits:
    """One page of a search; ``next`` is the cursor of the following one."""

    results: tuple[PackageHit, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """One version of a package."""

    version: str
    content_digest: str
    package_digest: str
    published: str = ""
    yanked: str | None = None
    """The reason of the yank, if it was yanked."""
    revoked: str | None = None
    """The reason why every key that signed it was revoked, if they were."""
    size: int = 0
    signer: str | None = None
    downloads: int = 0
    kinds: tuple[str, ...] = ()
    base: BaseRequirement | None = None
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether it was neither yanked nor signed by revoked keys alone."""
        return self.yanked is None and self.revoked is None


@dataclass(frozen=True, slots=True)
class PackageSummary:
    """A package with all its versions."""

    name: str
    description: str = ""
    latest: str | None = None
    owners: tuple[str, ...] = ()
    versions: tuple[PackageVersion, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """One version with its ``expert.json``, which is not verified here."""

    release: PackageVersion
    manifest: JsonObject


def search_packages(
    api: ApiClient, text: str, *, limit: int, cursor: str | None = None
) -> PackageHits:
    """Return the packages whose name, description or keywords match a text."""
    wanted = {"q": text, "limit": str(limit), **({"cursor": cursor} if cursor else {})}
    document = api.get(f"search?{urlencode(wanted)}")
    return parse_answer(document, PackageHits, host=api.address.host)


def fetch_package(api: ApiClient, package: PackageName) -> PackageSummary:
    """Return a package with its versions.

    Raises:
        NotFoundError: when there is none of this name that the user may read.
    """
    page = parse_answer(api.get(f"packages/{package}"), PackageSummary, host=api.address.host)
    _check_package(page.name, package, page.versions, api.address.host)
    return page


def fetch_version(api: ApiClient, package: PackageName, version: Version) -> VersionSummary:
    """Return one version.

    Raises:
        NotFoundError: when there is none that the user may read.
    """
    document = api.get(f"packages/{package}/{quote(str(version))}")
    manifest = document.get("manifest")
    if not isinstance(manifest, dict):
        raise RegistryError(f"{api.address.host} about {package}: there is no manifest")
    release = parse_answer(document, PackageVersion, host=api.address.host)
    _check_package(str(package), package, [release], api.address.host)
    return VersionSummary(release, manifest)


def mark_revoked_versions(
    releases: Iterable[PackageVersion], record: TrustRecord, *, namespace: str, host: str
) -> tuple[PackageVersion, ...]:
    """Return releases, marking as revoked also those whose newest signer is revoked here."""
    return tuple(_mark_revoked(release, record, namespace, host) for release in releases)


def mark_revoked_hits(
    hits: Iterable[PackageHit], record: TrustRecord, *, host: str
) -> tuple[PackageHit, ...]:
    """Return hits, marking as revoked also those whose newest signer is revoked here."""
    return tuple(_mark_revoked(hit, record, hit.name.partition("/")[0], host) for hit in hits)


_Signed = TypeVar("_Signed", PackageVersion, PackageHit)


def _mark_revoked(item: _Signed, record: TrustRecord, namespace: str, host: str) -> _Signed:
    if item.revoked is not None or item.signer is None:
        return item
    found = record.find_revocation(item.signer, namespace=namespace, registry=host)
    return replace(item, revoked=found.reason) if found else item


def yank_version(api: ApiClient, package: PackageName, version: Version, reason: str) -> None:
    """Yank a version: new installs skip it; existing lock files still get it."""
    api.put(_yank_path(package, version), {"reason": reason})


def unyank_version(api: ApiClient, package: PackageName, version: Version) -> None:
    """Undo a yank."""
    api.delete(_yank_path(package, version))


def _yank_path(package: PackageName, version: Version) -> str:
    return f"packages/{package}/{quote(str(version))}/yank"


def _check_package(
    name: str, package: PackageName, releases: Iterable[PackageVersion], host: str
) -> None:
    """Refuse an answer about another package, or with malformed versions."""
    try:
        same = PackageName.parse(name) == package
        for release in releases:
            Version.parse(release.version)
            Digest.parse(release.content_digest)
            Digest.parse(release.package_digest)
    except ExpertError as error:
        raise RegistryError(f"{host} about {package}: {error.message}") from error
    if not same:
        raise RegistryError(f"{host} sent another package instead of {package}")
