"""Listening addresses, and serving an ASGI application under granian in worker processes.

One process handles signals, its workers answer requests. If it is killed, the workers end with it;
at SIGTERM or SIGINT, running requests are finished first, within ``drain_seconds``.

Connections: one that sends nothing is closed after `HEADER_MILLISECONDS`, one whose body stalls
after `expertctl.http.limits.STALL_SECONDS`. Until then it counts towards `MAX_CONNECTIONS`, beyond
which connections wait, so that limit is high. A proxy in front can limit connections by address.

Signals: granian sets a `threading.Event` in its signal handlers. A handler that runs while the main
thread is inside that event, waiting for it or setting it for an earlier signal, deadlocks; and when
two signals arrive together, other threads may take both, which does not wake the main thread. Here
the thread that takes a signal writes it into a pipe, without Python, and one thread forwards what
it reads. In a worker, granian aborts running requests at the second signal, which always comes when
a terminal signals all processes; here a worker handles only the first.
"""

import asyncio
import ctypes
import ipaddress
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.errors import ConfigurationError
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server import MPServer
from starlette.applications import Starlette

from expertctl.errors import RegistryError, UsageError
from expertctl.http.log import configure_log


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A reserved address: ``host`` is an IP address, ``port`` the actual port."""

    host: str
    port: int
    secure: bool

    @property
    def url(self) -> str:
        """The address as a URL."""
        return build_url(self.host, self.port, secure=self.secure)


def build_url(host: str, port: int, *, secure: bool) -> str:
    """Return the scheme, host and port that clients use, without a trailing slash."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def reserve_address(host: str, port: int, *, secure: bool) -> Iterator[ListenAddress]:
    """Find a free port, or check the given one, and hold it until the server has bound it as well.

    Workers share a port by ``SO_REUSEPORT``, with which two servers could share one unnoticed; so
    the port is first bound without it.

    Raises:
        RegistryError: when the address cannot be used.
    """
    try:
        family, address = _resolve_address(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = (address[0], probe.getsockname()[1])
        holder = socket.socket(family)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise RegistryError(message, hint="choose another with --host and --port") from error
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield ListenAddress(address[0], address[1], secure)


def is_answering(address: ListenAddress) -> bool:
    """Return whether something accepts connections there."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex((address.host, address.port)) == 0


def _resolve_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


MAX_CONNECTIONS = 8192
_RESERVED_FILES = 1024
"""Files besides connections: the database, blobs, uploads, sockets between processes."""


def raise_file_limit() -> None:
    """Let this process and its workers open enough files, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _RESERVED_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEAT_SECONDS = 0.5
_READ_BYTES = 4096


def install_signal_handlers(server: MPServer) -> None:
    """Stop ``server`` at SIGINT and SIGTERM, reload its workers at SIGHUP; a startup hook.

    On a terminal SIGHUP says that the terminal is closed, so the server stops, too.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, operator.is_)  # does nothing, in C: no signal can interrupt it
    reloads = set() if sys.stdin.isatty() and sys.stderr.isatty() else {signal.SIGHUP}
    arguments = (receiver, server, reloads)
    threading.Thread(target=_forward_signals, args=arguments, daemon=True).start()


def ignore_signals() -> None:
    """Ignore late signals, so that they do not change the exit status; a shutdown hook."""
    sys.unraisablehook = _report_unraisable
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _report_unraisable(report: "sys.UnraisableHookArgs") -> None:
    """Report an error that cannot be raised; Python's about a signal ignored meanwhile is none."""
    error = report.exc_value
    if not (isinstance(error, OSError) and str(error).endswith("ignored due to race condition")):
        sys.__unraisablehook__(report)


def forward_first_signal(
    loop: asyncio.AbstractEventLoop,
    on_stop: Callable[[], None],
    on_second_interrupt: Callable[[], None],
) -> None:
    """Forward only the first signal to the handlers that a worker will add to its loop.

    ``on_stop`` is called before that handler, and ``on_second_interrupt`` when SIGINT comes for
    the second time, as when Ctrl-C is pressed again. Both must return at once.
    """
    signal.set_wakeup_fd(-1)
    add = loop.add_signal_handler
    received: list[int] = []

    def add_once(number: int, handler: Callable[..., object], *values: object) -> None:
        def run_handler_once() -> None:
            received.append(number)
            if len(received) == 1:
                on_stop()
                handler(*values)
            elif number == signal.SIGINT and received.count(signal.SIGINT) == 2:
                on_second_interrupt()

        add(number, run_handler_once)

    loop.add_signal_handler = add_once  # type: ignore[method-assign,assignment]  # not our class


def _forward_signals(pipe: int, server: MPServer, reloads: set[int]) -> None:
    """Forward signals to the server; repeat a stop until the server has ended.

    Signals in ``reloads`` restart the workers, and all others stop the server.

    Once is not enough: a reload that begins just then loses it, and a worker that was just forked
    has the handlers of its parent, which do nothing there.
    """
    while set(os.read(pipe, _READ_BYTES)) <= reloads:
        server.signal_handler_reload()  # type: ignore[no-untyped-call]  # granian's
    while True:
        server.signal_handler_interrupt()  # type: ignore[no-untyped-call]  # granian's
        time.sleep(_REPEAT_SECONDS)
        for worker in tuple(server.wrks):
            worker.terminate()  # type: ignore[no-untyped-call]  # granian's


START_SECONDS = 120
HEADER_MILLISECONDS = 15_000
_POLL_SECONDS = 0.02
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""

LoadApp = Callable[[], Starlette]
ReportAddress = Callable[[ListenAddress], None]
OnStop = Callable[[Starlette], None]


def do_nothing(_: Starlette) -> None:
    """Stop as soon as running requests are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GranianOptions:
    """How an application is run; ``log`` is from `expertctl.http.log.build_log_config`."""

    name: str
    log: dict[str, Any]
    drain_seconds: int
    """Maximum seconds that running requests may take after a stop signal."""
    workers: int = 1
    certificate: Path | None = None
    private_key: Path | None = None
    on_stop: OnStop = do_nothing
    """Called first in a worker that gets a stop signal; must return at once."""
    on_second_interrupt: OnStop = do_nothing
    """Called in a worker that gets SIGINT for the second time; must return at once."""


def build_server(options: GranianOptions, address: ListenAddress) -> MPServer:
    """Create a server that is not running yet.

    Raises:
        UsageError: when the certificate or its key is invalid.
    """
    try:
        return MPServer(
            options.name,
            address=address.host,
            port=address.port,
            interface=Interfaces.ASGI,
            workers=options.workers,
            workers_kill_timeout=options.drain_seconds,
            backpressure=MAX_CONNECTIONS,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(header_read_timeout=HEADER_MILLISECONDS),
            websockets=False,
            log_level=LogLevels.warning,
            log_dictconfig=options.log,
            ssl_cert=options.certificate,
            ssl_key=options.private_key,
        )
    except (OSError, ValueError, ConfigurationError) as error:
        named = f"{options.certificate} and {options.private_key}"
        message = f"{named} are not a certificate and its key: {error}"
        raise UsageError(message, hint="both in PEM form, the key without passphrase") from error


def run_server(server: MPServer, options: GranianOptions, load: LoadApp) -> None:
    """Serve the application of ``load`` in each worker, until SIGTERM or SIGINT.

    Raises:
        RegistryError: when a worker ended by itself.
    """
    raise_file_limit()
    server.on_startup(partial(install_signal_handlers, server))
    server.on_shutdown(ignore_signals)
    try:
        loading = partial(_load_worker, load, options, os.getpid())
        server.serve(target_loader=loading, wrap_loader=False)
    except SystemExit as error:
        if error.code and not server.interrupt_signal:
            message = "a worker of the server ended by itself"
            raise RegistryError(message, hint="the lines above say why") from error


def report_when_ready(address: ListenAddress, report: ReportAddress) -> None:
    """Call ``report`` when the first worker accepts connections, from a thread."""

    def watch() -> None:
        ended = time.monotonic() + START_SECONDS
        while time.monotonic() < ended:
            time.sleep(_POLL_SECONDS)
            if is_answering(address):
                report(address)
                return

    threading.Thread(target=watch, daemon=True).start()


def _load_worker(load: LoadApp, options: GranianOptions, parent: int) -> Starlette:
    """Create the application in a worker process, which ends with its parent."""
    _exit_with_parent(parent)
    made: list[Starlette] = []

    def call(hook: OnStop) -> None:
        for app in made:
            hook(app)

    hooks = (partial(call, options.on_stop), partial(call, options.on_second_interrupt))
    forward_first_signal(asyncio.get_event_loop(), *hooks)
    configure_log(options.log)
    made.append(load())
    return made[0]


def _exit_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
