"""Answers of a running server for `run` and `chat`; neither the engine nor numpy is imported.

The server is that of the setting ``server`` (``EXPERT_SERVER``), which must answer, or one that
`serve` has recorded in this home. A recorded server is used only if it would answer as a run in
this process does: the same settings and project, and the base that such a run would choose, which
the server checks. Otherwise, and where it cannot be reached or ends before the first piece of
text, the run happens in this process. An overloaded server is an error: it holds the memory that
the run would need.

Before anything else is sent to a recorded server, it proves on the same connection that it knows
the secret of its record; `ProvenTransport` never opens another one for the request.
"""

import http.client
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from expertctl.cli.output import debug, note, warn
from expertctl.cli.remote_question import RemoteAnswer, RemoteQuestion
from expertctl.client.client import DEFAULT_TIMEOUT, ExpertClient, InferStream
from expertctl.client.protocol import Retries, parse_address
from expertctl.errors import (
    BaseMismatchError,
    CancelledError,
    ExpertError,
    NotFoundError,
    RateLimitError,
    TooLargeError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
    sanitise_text,
)
from expertctl.reference import is_loopback
from expertctl.settings import Settings
from expertctl.store.preference import find_working_folder
from expertctl.store.server_record import (
    ServerRecord,
    create_nonce,
    derive_key,
    describe_home_policy,
    is_proof,
    list_servers,
)

CONNECT_SECONDS = 0.5
PROOF_SECONDS = 5.0
"""For the whole proof: a server whose processors are busy is slow, but it is there."""
LOCAL_HINT = "`--local` answers in this process"
_PROOF_PATH = "/v1/proof"
_MAX_PROOF_BYTES = 4096
_READ_BYTES = 1 << 16
_SERVER_FIELDS = frozenset(
    ("submitted_at", "tokens_generated", "experts_used", "latency_ms", "stopped_by", "stages")
)
"""What an answer of a server has beyond the document of ``run --json``, besides one timing."""
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


class ProvenTransport(httpx2.BaseTransport):
    """One connection to the server of a record, whose proof was checked when it was opened."""

    def __init__(self, url: str, secret: str) -> None:
        """Connect, and check the proof.

        Raises:
            UnreachableError: when nothing answers in time, or the server does not know the secret.
        """
        target = httpx2.URL(url)
        self._connection = http.client.HTTPConnection(
            target.host, target.port, timeout=CONNECT_SECONDS
        )
        try:
            self._connection.connect()
            self._connection.auto_open = 0
            with _limit_time(self._connection.sock, PROOF_SECONDS):
                self._check_proof(url, secret)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, (*_NETWORK_ERRORS, msgspec.MsgspecError, ValueError)):
                what = sanitise_text(str(error)) or type(error).__name__
                raise UnreachableError(f"{url}: {what}", sent=False) from error
            raise
        self._connection.sock.settimeout(DEFAULT_TIMEOUT)

    def _check_proof(self, url: str, secret: str) -> None:
        nonce = create_nonce()
        body, kind = msgspec.json.encode({"nonce": nonce}), {"Content-Type": "application/json"}
        self._connection.request("POST", _PROOF_PATH, body, kind)
        answer = self._connection.getresponse()
        data = answer.read(_MAX_PROOF_BYTES + 1)
        is_whole = answer.status == 200 and len(data) <= _MAX_PROOF_BYTES
        found = msgspec.json.decode(data, type=dict[str, str]) if is_whole else {}
        if not is_proof(secret, nonce, found.get("proof", "")):
            raise UnreachableError(f"{url}: this is not the server of its record", sent=False)
        if self._connection.sock is None:
            raise UnreachableError(f"{url}: the server closed the connection", sent=False)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request on the proven connection; failures are httpx errors."""
        connection, target = self._connection, request.url.raw_path.decode("ascii")
        try:
            connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                connection.putheader(name, value)
            with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may have come
                connection.endheaders(request.read())
            answer = connection.getresponse()
        except _NETWORK_ERRORS as error:
            raise httpx2.ReadError(str(error) or type(error).__name__, request=request) from error
        stream = _BodyStream(answer)
        return httpx2.Response(
            answer.status, headers=answer.getheaders(), stream=stream, request=request
        )

    def close(self) -> None:
        """Close the connection, which cancels an unfinished answer."""
        self._connection.close()


@contextmanager
def _limit_time(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Break a connection after this time, however slowly bytes come."""

    def break_connection() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    connection.settimeout(seconds)
    timer = threading.Timer(seconds, break_connection)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _BodyStream(httpx2.SyncByteStream):
    """The body of a response, as it comes."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        try:
            while data := self._answer.read1(_READ_BYTES):
                yield data
        except _NETWORK_ERRORS as error:
            raise httpx2.ReadError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        self._answer.close()


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Where a server listens: one that the user named, or one of a record."""

    url: str
    record: ServerRecord | None = None
    ca_file: str | None = None

    @property
    def described(self) -> str:
        """The server as messages name it."""
        process = "" if self.record is None else f" (pid {self.record.pid})"
        return f"the server at {self.url}{process}"

    def open(self) -> ExpertClient:
        """Return a client of it.

        Raises:
            UnreachableError: when the server of a record does not answer, or does not prove itself.
            UsageError: when the address, the key or the file of certificates is invalid.
        """
        if self.record is None:
            transport = None if self.ca_file is None else _make_transport(self.ca_file)
            return ExpertClient(self.url, retries=Retries(attempts=1), transport=transport)
        secret = self.record.secret
        return ExpertClient(
            self.url,
            api_key=derive_key(secret),
            retries=Retries(attempts=1),
            transport=ProvenTransport(self.url, secret),
        )


def _make_transport(ca_file: str) -> httpx2.HTTPTransport:
    from expertctl.registry.transport import load_certificates  # few servers need it

    context = httpx2.create_ssl_context(trust_env=False)
    load_certificates(context, ca_file)
    return httpx2.HTTPTransport(verify=context, trust_env=False)


class RemoteStream:
    """An answer that the server at ``place`` has begun."""

    def __init__(
        self, place: ServerPlace, stream: InferStream, first: str, stack: ExitStack
    ) -> None:
        """Own the stream and what ``stack`` closes after it."""
        self.place = place
        self._stream, self._first, self._stack = stream, first, stack

    def read(self, cancelled: Callable[[], bool]) -> Generator[str, None, RemoteAnswer]:
        """Yield pieces of text and return the answer; cancelled on the server if asked for.

        Raises:
            CancelledError: when it was to be cancelled and the server did not confirm it.
            ExpertError: when the request fails, or the connection breaks.
        """
        is_cancelled = False
        with closing(self), _hint_local():
            yield self._first
            for chunk in self._stream:
                yield chunk.text
                if cancelled() and not is_cancelled:
                    is_cancelled = True
                    self._cancel()
            data = msgspec.json.decode(self._stream.document, type=dict[str, Any])
            document = {name: value for name, value in data.items() if name not in _SERVER_FIELDS}
            document["timings_ms"].pop("post", None)
            return RemoteAnswer(document, self._stream.result)

    def _cancel(self) -> None:
        """Cancel the answer; what cannot be cancelled ends with the connection.

        Raises:
            CancelledError: then.
        """
        job_id = "" if self._stream.started is None else self._stream.started.job_id
        try:
            with self.place.open() as client:
                client.jobs.cancel(job_id)
        except NotFoundError:
            pass  # it has just ended
        except ExpertError as error:
            raise CancelledError(
                f"the answer was broken off: it could not be cancelled: {error.message}"
            ) from error

    def close(self) -> None:
        """Close the connection, which cancels an unfinished answer."""
        self._stack.close()


@contextmanager
def _hint_local() -> Iterator[None]:
    """Add to errors of servers the hint that the answer can be computed here; name the key."""
    try:
        yield
    except UnauthenticatedError as error:
        error.hint = (
            f"EXPERT_API_KEY is the key for the server that EXPERT_SERVER names; {LOCAL_HINT}"
        )
        raise
    except (RateLimitError, TooLargeError, UnreachableError) as error:
        error.hint = "; ".join(filter(None, (error.hint, LOCAL_HINT)))
        raise


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """The servers that may answer, in this order."""

    places: tuple[ServerPlace, ...]
    is_named: bool
    """Whether the user named the server; then nothing is answered in this process."""

    def start(
        self,
        question: RemoteQuestion,
        *,
        leave: tuple[type[ExpertError], ...] = (BaseMismatchError, TooLargeError, UsageError),
    ) -> RemoteStream | None:
        """Begin an answer; None if it is to be computed in this process.

        Refusals of the kinds ``leave`` are left to this process, unless the server was named.

        Raises:
            ExpertError: when a server that should answer refuses, or the named one is not there.
        """
        for place in self.places:
            if (stream := self._try(place, question, leave)) is not None:
                return stream
        return None

    def _try(
        self, place: ServerPlace, question: RemoteQuestion, leave: tuple[type[ExpertError], ...]
    ) -> RemoteStream | None:
        with ExitStack() as stack, _hint_local():
            try:
                client = stack.enter_context(place.open())
                answer = client.infer_stream(question.prompt, **question.fields)
                first = next(stack.enter_context(answer), None)
            except UnreachableError as error:
                if self.is_named:
                    raise
                note(f"{place.described} is not used: {error.message}", dim=True)
                return None
            except leave as error:
                if self.is_named:
                    raise
                debug(f"{place.described} does not answer this: {error.message}")
                return None
            text = "" if first is None else first.text
            return RemoteStream(place, answer, text, stack.pop_all())

    @contextmanager
    def open_client(self) -> Iterator[ExpertClient]:
        """Provide a client of the first server.

        Raises:
            ExpertError: as `start` does.
        """
        with _hint_local(), self.places[0].open() as client:
            yield client


def choose_server(settings: Settings, local_options: Sequence[str]) -> RemoteEngine | None:
    """Return the servers that may answer; None if there is none.

    ``local_options`` are the given options that only an engine in this process honours.

    Raises:
        UsageError: when the user named a server together with such an option, or its address is
            invalid or would send prompts unencrypted to another machine.
    """
    if settings.server is not None:
        url = _parse_named_address(settings.server)
        if local_options:
            raise UsageError(
                f"{', '.join(local_options)} cannot be used with the server {url}",
                hint=f"leave it out; {LOCAL_HINT}",
            )
        ca_file = None if settings.ca_file is None else str(settings.ca_file)
        return RemoteEngine((ServerPlace(url, ca_file=ca_file),), is_named=True)
    found = list_servers(settings.home.servers)
    warn(found.problems)
    if found.records and local_options:
        debug(f"no server is used: {', '.join(local_options)} needs an engine in this process")
        return None
    suited = tuple(
        ServerPlace(record.url, record) for record in found.records if _is_alike(record, settings)
    )
    return RemoteEngine(suited, is_named=False) if suited else None


def _parse_named_address(text: str) -> str:
    url = parse_address(text)
    parsed = httpx2.URL(url)
    if parsed.scheme == "http" and not is_loopback(parsed.host):
        raise UsageError(
            f"{url} would send prompts and keys unencrypted",
            hint="use https; http is for servers on this machine, whatever allow_http says",
        )
    return url


def _is_alike(record: ServerRecord, settings: Settings) -> bool:
    """Tell whether the server of a record answers as this process would; say why not."""
    wanted = {
        **describe_home_policy(settings, find_working_folder()),
        "dtype": settings.dtype,
        "adapter_dtype": settings.adapter_dtype or "published",
        "deterministic": settings.deterministic,
        "device": settings.device or "cpu",
        "moe_miss": "exact",
        "on_budget": "queue",
        "timeout": None,
        "log_prompts": False,
    }
    if settings.device == "auto":
        wanted["device"] = record.policy.get("device")
    others = [name for name in wanted if record.policy.get(name, "") != wanted[name]]
    if others:
        debug(f"the server at {record.url} is not used: it has another {', '.join(others)}")
    return not others
