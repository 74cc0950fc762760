"""The two interfaces of a registry: `ApiClient` for ``/api/v1``, `OciClient` for OCI distribution.

`ApiClient` gives answers about packages as types. Unknown fields are ignored, so that a newer
registry can say more. Text is kept as received; the code that shows it makes it harmless. What a
registry says here about packages is for people (``search``, ``info``) and never a base for trust:
install trusts the signed index document alone.

`OciClient`, for any registry, returns a manifest requested by digest only if it has that digest,
and one requested by tag only if it has the digest that the registry names, if any.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    OfflineError,
    RateLimitError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
    sanitise_text,
)
from expertctl.package.layout import INDEX_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES
from expertctl.reference import PackageName, Version
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import (
    RegistryHttp,
    RegistryRequest,
    RegistryResponse,
    StreamedResponse,
)
from expertctl.registry.upload import BlobUpload, Uploader
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


def search_packages(api: ApiClient, text: str, *, limit: int) -> PackageHits:
    """Return the packages whose name, description or keywords match a text."""
    document = api.get(f"search?{urlencode({'q': text, 'limit': limit})}")
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


_MAX_ANSWER = 4 << 20
_DIGEST_HEADER = "docker-content-digest"
_TYPES = f"{MANIFEST_TYPE}, {INDEX_TYPE}"
_REPOSITORY = re.compile(
    r"(?=.{1,255}\Z)[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """A manifest of a registry; ``digest`` is that of ``data``."""

    digest: Digest
    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class OciClient:
    """A client of one registry; repositories are named ``namespace/name``."""

    http: RegistryHttp
    address: RegistryAddress
    uploads: Path | None = field(default=None)
    """Where interrupted uploads are stored; None: another process starts over."""

    def ping(self) -> None:
        """Check that there is a registry, and that it accepts the login.

        Raises:
            UnauthenticatedError: when it requires a login, or another one.
        """
        self.http.request(RegistryRequest("GET", self.address, "/v2/"), max_bytes=_MAX_ANSWER)

    def fetch_manifest(
        self, repository: str, reference: str | Digest, *, max_bytes: int = MAX_MANIFEST_BYTES
    ) -> RemoteManifest:
        """Return a manifest by tag or digest.

        Raises:
            NotFoundError: when there is none.
            DigestError: when the bytes are not those of the digest.
        """
        call = self._make_request("GET", repository, _manifest_path(reference), {"Accept": _TYPES})
        answer = self.http.request(call, max_bytes=max_bytes)
        digest = Digest.compute(answer.body)
        self._check_digest(answer, digest, reference, repository)
        return RemoteManifest(digest, answer.body, answer.headers.get("content-type", ""))

    def fetch_manifest_digest(self, repository: str, tag: str) -> Digest | None:
        """Return the digest that a registry states for a tag; None where there is no such tag.

        Raises:
            RegistryError: when it does not say so.
        """
        call = self._make_request("HEAD", repository, _manifest_path(tag), {"Accept": _TYPES})
        try:
            answer = self.http.request(call, max_bytes=0)
        except NotFoundError:
            return None
        return self._header_digest(answer, repository)

    def put_manifest(self, repository: str, reference: str | Digest, data: bytes) -> Digest:
        """Store a manifest under a tag or its digest.

        Raises:
            ConflictError: when the tag is taken.
        """
        headers = {"Content-Type": MANIFEST_TYPE}
        call = self._make_request("PUT", repository, _manifest_path(reference), headers)
        call = replace(call, body=data, scope=_token_scope(repository, "pull,push"))
        self.http.request(call, max_bytes=_MAX_ANSWER, accept={201})
        return Digest.compute(data)

    def has_blob(self, repository: str, digest: Digest) -> bool:
        """Tell whether a repository has a blob."""
        try:
            call = self._make_request("HEAD", repository, f"blobs/{digest}")
            self.http.request(call, max_bytes=0)
        except NotFoundError:
            return False
        return True

    @contextmanager
    def open_blob(
        self, repository: str, digest: Digest, *, headers: Mapping[str, str] | None = None
    ) -> Iterator[StreamedResponse]:
        """Request a blob, or with a ``Range`` header the rest of it; the bytes are not checked.

        Raises:
            NotFoundError: when it is not there.
        """
        call = self._make_request("GET", repository, f"blobs/{digest}", headers)
        with self.http.open_stream(call, accept={200, 206, 416}) as answer:
            yield answer

    def upload_blob(
        self,
        repository: str,
        digest: Digest,
        size: int,
        open_blob: Callable[[], AbstractContextManager[BinaryIO]],
        *,
        progress: Progress = ignore_progress,
    ) -> bool:
        """Upload a blob unless the registry has it; tell whether its bytes were sent.

        Raises:
            DigestError: when the bytes are not those of the digest.
        """
        if self.has_blob(repository, digest):
            progress(size)
            return False
        path, scope = _repository_path(repository, "blobs/uploads/"), "pull,push"
        upload = BlobUpload(path, _token_scope(repository, scope), digest, size)
        Uploader(self.http, self.address, self.uploads).send(upload, open_blob, progress=progress)
        return True

    def _make_request(
        self, method: str, repository: str, rest: str, headers: Mapping[str, str] | None = None
    ) -> RegistryRequest:
        target, scope = _repository_path(repository, rest), _token_scope(repository, "pull")
        return RegistryRequest(method, self.address, target, headers=headers or {}, scope=scope)

    def _check_digest(
        self, answer: RegistryResponse, digest: Digest, reference: str | Digest, repository: str
    ) -> None:
        if isinstance(reference, Digest):
            expected: Digest | None = reference
        else:
            named = _DIGEST_HEADER in answer.headers
            expected = self._header_digest(answer, repository) if named else None
        if expected not in {None, digest}:
            message = f"{self.address.host}: the manifest of {repository} is not {expected}"
            raise DigestError(message, hint="a proxy or the registry alters it")

    def _header_digest(self, answer: RegistryResponse, repository: str) -> Digest:
        text = answer.headers.get(_DIGEST_HEADER, "")
        try:
            return Digest.parse(text)
        except DigestError as error:
            shown = f"{sanitise_text(text, 80)!r} is no sha256 digest"
            fact = shown if text else "it names no digest"
            raise RegistryError(f"{self.address.host}: {repository}: {fact}") from error


def _repository_path(repository: str, rest: str) -> str:
    if not _REPOSITORY.fullmatch(repository):
        raise NotFoundError(f"{sanitise_text(repository, 80)!r} cannot be the name of a repository")
    return f"/v2/{repository}/{rest}"


def _manifest_path(reference: str | Digest) -> str:
    if isinstance(reference, str) and not _TAG.fullmatch(reference):
        raise NotFoundError(f"{sanitise_text(reference, 80)!r} cannot be a tag")
    return f"manifests/{quote(str(reference), safe=':')}"


def _token_scope(repository: str, actions: str) -> str:
    return f"repository:{repository}:{actions}"
