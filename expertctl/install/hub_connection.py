"""Requests to a hub of models, through its own client.

``huggingface_hub`` (extra ``hub``) is imported only here, and only when a request is made: its
session, its headers and its errors are used. A token is sent to the hub alone, and only over TLS or
on this machine; a redirect to another host gets none. Texts of the hub are never printed: an error
says in our words what a status means.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urljoin, urlsplit

from expertctl.errors import (
    DigestError,
    ExpertError,
    ForbiddenError,
    NotFoundError,
    OfflineError,
    RateLimitError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
    format_install_command,
    to_single_line,
)
from expertctl.install.hub_files import (
    ENDPOINT_HINT,
    HubFile,
    HubListing,
    HubName,
    build_unknown_model_error,
    parse_listing,
)

if TYPE_CHECKING:
    from httpx2 import Response

_DEFAULT_ENDPOINT = "https://huggingface.co"
CHANGED_HINT = "repeat the command; if it happens again, something on the way changes files"
RESUME_HINT = "repeat the command: it goes on with what is missing"
_TIMEOUT_SECONDS = 10.0
_SWITCHED_ON = {"1", "on", "yes", "true"}
_MAX_LISTING = 32 << 20
_MAX_REDIRECTS = 5
_COMMIT_HEADER = "X-Repo-Commit"
_ETAG = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_PROGRAM = "expertctl"


@dataclass(frozen=True, slots=True)
class HubConnection:
    """One hub, and whether anything may be sent to it.

    Its methods raise `RegistryError` and its kinds when the hub does not answer or refuses, and
    `NotFoundError` when it has no such model.
    """

    endpoint: str = _DEFAULT_ENDPOINT
    is_offline: bool = False
    timeout: float = _TIMEOUT_SECONDS
    """Seconds without a byte after which a connection counts as broken."""

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, is_offline: bool
    ) -> "HubConnection":
        """Return the connection that the variables of ``huggingface_hub`` describe."""
        address = environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
        switch = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
        seconds = environment.get("HF_HUB_DOWNLOAD_TIMEOUT", "")
        return cls(
            address.rstrip("/"),
            is_offline or switch.casefold() in _SWITCHED_ON,
            float(seconds) if seconds.isdecimal() and int(seconds) else _TIMEOUT_SECONDS,
        )

    @property
    def host(self) -> str:
        """The hub as messages name it."""
        return urlsplit(self.endpoint).netloc.rpartition("@")[2]

    def list_files(self, name: HubName) -> HubListing:
        """Ask the hub for the commit of a revision and the files at it."""
        if self.is_offline:
            raise _build_offline_error(name)
        self._require_address()
        path = f"{self.endpoint}/api/models/{name.repository}"
        address = f"{path}/revision/{quote(name.wanted_revision, safe='')}?blobs=true"
        data = bytearray()
        with self._guard(name), self._open(address, {}, name) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > _MAX_LISTING:
                    raise RegistryError(
                        f"the answer about {name.repository} is too large", hint=ENDPOINT_HINT
                    )
        return parse_listing(bytes(data), name)

    def read_etag(self, listing: HubListing, file: HubFile) -> str:
        """Return the name of a file in the cache, if the hub still has the one that it listed.

        Raises:
            DigestError: when it has another one.
        """
        address, name = self._build_address(listing, file), listing.name
        with self._guard(name), self._open(address, {}, name, method="HEAD") as response:
            return _check_metadata(response, listing, file)

    @contextmanager
    def open_rest(
        self, listing: HubListing, file: HubFile, start: int
    ) -> Iterator[tuple[bool, Iterator[bytes]]]:
        """Ask for the bytes of a file from ``start`` on.

        Yields whether they are the rest, else all bytes of the file follow; and the bytes.
        """
        span = {"Range": f"bytes={start}-"} if start else {}
        address, name = self._build_address(listing, file), listing.name
        with self._guard(name), self._open(address, span, name) as response:
            is_rest = bool(span) and response.status_code == 206
            said = response.headers.get("Content-Range", "")
            if is_rest and not said.startswith(f"bytes {start}-"):
                raise RegistryError(
                    f"{name}: {self.host} sends another part of {file.name}", hint=ENDPOINT_HINT
                )
            yield is_rest, response.iter_bytes()

    def _require_address(self) -> None:
        """Require that the hub has an address that requests can be sent to."""
        try:
            scheme, host, _ = _read_origin(self.endpoint)
        except ValueError:
            scheme, host = "", None
        if scheme not in {"http", "https"} or not host:
            shown = to_single_line(self.endpoint[:100])
            raise UsageError(
                f"HF_ENDPOINT: {shown!r} is not the address of a hub",
                hint=f"such as {_DEFAULT_ENDPOINT}",
            )

    def _build_address(self, listing: HubListing, file: HubFile) -> str:
        path = f"{listing.name.repository}/resolve/{listing.commit}/{quote(file.name)}"
        return f"{self.endpoint}/{path}"

    @property
    def _is_private(self) -> bool:
        """Whether nobody on the way reads what is sent: with TLS, or on this machine."""
        parts = urlsplit(self.endpoint)
        if parts.scheme == "https" or parts.hostname == "localhost":
            return True
        with suppress(ValueError):
            return ip_address(parts.hostname or "").is_loopback
        return False

    def withholds_token(self) -> bool:
        """Tell whether the user has a token that this hub does not get, because it lacks TLS."""
        self._require_address()
        return not self._is_private and "authorization" in _build_headers({}, may_identify=True)

    @contextmanager
    def _open(
        self,
        address: str,
        headers: Mapping[str, str],
        name: HubName,
        *,
        method: Literal["GET", "HEAD"] = "GET",
    ) -> Iterator["Response"]:
        """Send a request and follow its redirects; only the hub itself gets the token.

        A HEAD request ends where the hub describes the file and redirects to another host.
        """
        session = _load_library().get_session()
        own = {"Accept-Encoding": "identity", **headers}
        for _ in range(_MAX_REDIRECTS + 1):
            is_hub = _read_origin(address) == _read_origin(self.endpoint)
            sent = _build_headers(own, may_identify=is_hub and self._is_private)
            with session.stream(
                method, address, headers=sent, follow_redirects=False, timeout=self.timeout
            ) as response:
                is_described = method == "HEAD" and _COMMIT_HEADER in response.headers
                if is_described and self._leaves_hub(address, response):
                    yield response
                    return
                if not response.has_redirect_location:
                    if response.status_code >= 400 and is_hub:
                        raise self._build_refusal(response, name)
                    if response.status_code >= 400:
                        raise self._build_status_error(response, name)
                    yield response
                    return
                address = urljoin(address, response.headers["Location"])
            self._check_redirect(address, name)
        raise RegistryError(f"{name}: {self.host} redirects too often", hint=ENDPOINT_HINT)

    def _leaves_hub(self, address: str, response: "Response") -> bool:
        if not response.has_redirect_location:
            return False
        target = urljoin(address, response.headers["Location"])
        return _read_origin(target) != _read_origin(self.endpoint)

    def _check_redirect(self, address: str, name: HubName) -> None:
        allowed = {"https", urlsplit(self.endpoint).scheme}
        if urlsplit(address).scheme not in allowed or not urlsplit(address).hostname:
            raise RegistryError(
                f"{name}: {self.host} redirects to an address without TLS", hint=ENDPOINT_HINT
            )

    @contextmanager
    def _guard(self, name: HubName) -> Iterator[None]:
        """Turn errors of the client and of the connection into ours.

        An OSError of the disk passes; most errors of the client are such, too.
        """
        library, http = _load_library(), _load_http()
        try:
            yield
        except library.errors.HfHubHTTPError as error:
            raise self._build_refusal(error.response, name) from error
        except library.errors.OfflineModeIsEnabled as error:
            raise _build_offline_error(name) from error
        except (
            http.InvalidURL,
            http.UnsupportedProtocol,
            http.TooManyRedirects,
            http.DecodingError,
            ValueError,  # of a header that is no number, or no address
        ) as error:
            raise self._build_foreign_error(name) from error
        except http.HTTPError as error:
            raise self._build_broken_error(name) from error

    def _build_broken_error(self, name: HubName) -> ExpertError:
        return UnreachableError(
            f"{name}: the connection to {self.host} failed or broke", hint=RESUME_HINT
        )

    def _build_foreign_error(self, name: HubName) -> ExpertError:
        return RegistryError(
            f"{name}: the answer of {self.host} is not that of a hub",
            hint=ENDPOINT_HINT,
        )

    def _build_refusal(self, response: "Response", name: HubName) -> ExpertError:
        """Return the error for an answer with a status of 400 or more; its text is not used."""
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        message, host = response.headers.get("X-Error-Message", ""), self.host
        page = f"{self.endpoint.partition('://')[0]}://{host}/{name.repository}"
        if code == "GatedRepo":
            return ForbiddenError(
                f"{name.repository} is gated: {host} shows it only to those who accepted its terms",
                hint=f"accept them on {page}, then set HF_TOKEN to a token of that account",
            )
        if code == "RevisionNotFound":
            return NotFoundError(
                f"{name.repository} has no revision {name.wanted_revision}",
                hint="name a branch, a tag or a whole commit after the @",
            )
        if message == "Access to this resource is disabled.":
            return ForbiddenError(f"{host} has disabled {name.repository}", hint=f"see {page}")
        if status == 401 and message == "Invalid credentials in Authorization header":
            return UnauthenticatedError(
                f"{host} does not accept the token that was sent",
                hint="set HF_TOKEN to a valid token, or unset it; `hf auth login` saves one",
            )
        if code == "EntryNotFound":
            return RegistryError(
                f"{name}: {host} lists a file that it does not have", hint=ENDPOINT_HINT
            )
        if code == "RepoNotFound" or status in {401, 404}:
            return build_unknown_model_error(name, host)
        return self._build_status_error(response, name)

    def _build_status_error(self, response: "Response", name: HubName) -> ExpertError:
        status, retry_after = response.status_code, response.headers.get("Retry-After", "")
        if status == 403:
            return ForbiddenError(
                f"{name}: {self.host} refuses access", hint="check what the token may read"
            )
        if status == 429:
            seconds = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else 60
            return RateLimitError(
                f"{name}: too many requests to {self.host}",
                retry_after=seconds,
                hint=f"repeat the command in {seconds} s; it goes on with what is missing; "
                "with a token in HF_TOKEN more are allowed",
            )
        if status == 408 or status >= 500:
            return UnreachableError(
                f"{name}: {self.host} cannot answer now (HTTP {status})", hint=RESUME_HINT
            )
        return RegistryError(
            f"{name}: {self.host} refuses the request (HTTP {status})", hint=ENDPOINT_HINT
        )


def _build_headers(own: Mapping[str, str], *, may_identify: bool) -> dict[str, str]:
    """Return headers as the client of the hub sends them, with the user's token or without it."""
    build = _load_library().utils.build_hf_headers
    headers: dict[str, str] = build(
        token=None if may_identify else False, library_name=_PROGRAM, headers=dict(own)
    )
    if not headers.get("authorization", "").isascii():
        raise UsageError(
            "the token for the hub has a character that no token has",
            hint="set HF_TOKEN to a valid token, or unset it; `hf auth login` saves one",
        )
    return headers


def _check_metadata(response: "Response", listing: HubListing, file: HubFile) -> str:
    """Return the name of a file in the cache, if the hub still has the file that it listed."""
    headers = response.headers
    etag = headers.get("X-Linked-Etag") or headers.get("ETag") or ""
    etag = etag.removeprefix("W/").strip('"')
    if headers.get(_COMMIT_HEADER) != listing.commit or not _ETAG.fullmatch(etag):
        raise RegistryError(
            f"{listing.name}: the hub does not say which {file.name} it has",
            hint=ENDPOINT_HINT,
        )
    own_size = None if response.has_redirect_location else headers.get("Content-Length")
    size = headers.get("X-Linked-Size") or own_size or ""
    differs = file.digest is not None and etag != file.digest.hex
    if differs or (size.isdecimal() and size != str(file.size)):
        raise DigestError(
            f"{listing.name}: {file.name} is not the file that the hub listed: "
            f"{'other content' if differs else 'another size'}",
            hint=CHANGED_HINT,
        )
    return etag


def _read_origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _build_offline_error(name: HubName) -> OfflineError:
    return OfflineError(
        f"{name} is not complete in the cache of the hub, and expertctl is offline",
        hint="unset HF_HUB_OFFLINE, EXPERT_OFFLINE and the setting `offline`; or add a folder: "
        "`expertctl base add DIR`",
    )


def _load_library() -> Any:
    """Import the client of the hub, quiet and without telemetry.

    Raises:
        NotFoundError: when it is not installed.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when it is first imported
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"a model is downloaded by {error.name}, which is not installed",
            hint=f"{format_install_command('hub')}; or add a folder: `expertctl base add DIR`",
        ) from error
    library: Any = huggingface_hub
    library.utils.logging.set_verbosity_error()  # it would print texts of the hub
    return library


def _load_http() -> Any:
    import httpx2

    return httpx2
