"""What users are told: the tree of errors, notices, and foreign text made safe to print.

::

    ExpertError                      exit 1
    ├── UsageError                   exit 2   the call itself is wrong
    │   ├── MediaTypeError                    a body has an unsupported media type
    │   ├── ContextLengthError                a prompt is longer than the context
    │   ├── MisdirectedError                  a request for another server
    │   └── SlowBodyError                     a body does not arrive in time
    ├── NotFoundError                exit 3   a package, key, base or file is missing
    │   ├── MissingDependencyError            a required expert is not installed
    │   └── UnknownAddressError               a server has nothing at this path
    ├── IncompatibleError            exit 4   two things do not fit together
    │   ├── BaseMismatchError                 an expert and a base
    │   ├── ConflictError                     two experts
    │   └── KernelsUnavailableError           kernels and this machine, or what is installed
    ├── TrustError                   exit 5   no trusted key has signed it
    │   ├── SignatureError                    the signature itself does not verify
    │   ├── DigestError                       bytes do not match their digest
    │   │   └── ChangedVersionError           a version has other content than before
    │   ├── UnsignedError                     a signature is required and missing
    │   └── RevokedError                      the key was revoked
    ├── RegistryError                exit 6   network or registry
    │   ├── UnauthenticatedError              a valid token is required
    │   ├── ForbiddenError                    the caller may not do that
    │   ├── OfflineError                      the network is needed, and switched off
    │   ├── UnreachableError                  a connection failed or broke
    │   └── RateLimitError                    too many requests for now
    ├── BudgetError                  exit 7   memory, disk or quota is exhausted
    │   ├── DiskFullError
    │   └── TooLargeError                     one object exceeds its limit
    ├── InvalidPackageError          exit 8   a package or an input file is malformed
    ├── DeviceError                  exit 1   a device failed; the process cannot continue with it
    ├── StoreError                   exit 1   the store cannot be used (read-only, damaged)
    └── NoAnswerError                exit 1   a job ended before any part of its answer existed
        ├── TimedOutError                     the time allowed for it ran out
        └── CancelledError                    the caller no longer wants it

A message names the thing and the fact; ``hint`` gives the way out. Exit codes and HTTP statuses are
mapped at the edges (``expertctl/cli/process.py``), never here.

Unsafe characters are controls, lone surrogates, and those that reorder the text around them: bidi
embeddings, overrides and isolates (Unicode Technical Report 36, section 2.5; CVE-2021-42574).
Every other format character stays: words in Persian and emoji of several parts use joiners, and
right-to-left text uses marks.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar


class ExpertError(Exception):
    """Root of the tree; carries a stable ``code`` and a ``hint`` for the user."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Store the message and the hint."""
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ExpertError):
    """The call itself is wrong: an argument, an empty prompt, a bad combination."""

    code = "usage"

    def __init__(self, message: str, *, hint: str = "", unknown_name: str = "") -> None:
        """Also store the text given as the name of a package, if that is wrong."""
        super().__init__(message, hint=hint)
        self.unknown_name = unknown_name


class ContextLengthError(UsageError):
    """A prompt or a conversation is longer than the context.

    ``size`` and ``limit`` count ``unit``: tokens, or characters where nothing was tokenised.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, size: int = 0, limit: int = 0, unit: str = "tokens", hint: str = ""
    ) -> None:
        """Store the message and both lengths, which APIs report in formats of their own."""
        super().__init__(message, hint=hint)
        self.size, self.limit, self.unit = size, limit, unit


class MediaTypeError(UsageError):
    """The body of a request has a media type that is not accepted there."""

    code = "media_type"


class MisdirectedError(UsageError):
    """The request names another server."""

    code = "misdirected"


class SlowBodyError(UsageError):
    """The body of a request did not arrive in time."""

    code = "slow_body"


class NotFoundError(ExpertError):
    """A package, key, base or file does not exist."""

    code = "not_found"


class MissingDependencyError(NotFoundError):
    """An expert that another one requires is not installed."""

    code = "missing_dependency"


class UnknownAddressError(NotFoundError):
    """A server has nothing at the path of a request."""

    code = "unknown_url"


class IncompatibleError(ExpertError):
    """Two things do not fit together."""

    code = "incompatible"


class BaseMismatchError(IncompatibleError):
    """An expert was made for another base model."""

    code = "base_mismatch"


class ConflictError(IncompatibleError):
    """Two experts may not be installed or used together."""

    code = "conflict"


class KernelsUnavailableError(IncompatibleError):
    """Kernels can neither be compiled nor loaded here, so a base needs another backend."""

    code = "no_kernels"


class TrustError(ExpertError):
    """No key that is trusted for them has signed the bytes."""

    code = "trust"


class SignatureError(TrustError):
    """The signature bundle is malformed or does not verify."""

    code = "signature"


class DigestError(TrustError):
    """Bytes do not match their digest."""

    code = "digest"


class ChangedVersionError(DigestError):
    """A version has other content than before, which is never allowed."""

    code = "changed"


class UnsignedError(TrustError):
    """A signature is required and missing."""

    code = "unsigned"


class RevokedError(TrustError):
    """The signing key was revoked."""

    code = "revoked"


class RegistryError(ExpertError):
    """The network or a registry failed."""

    code = "registry"


class UnauthenticatedError(RegistryError):
    """The request is not authenticated: no token, or one that is wrong, expired or revoked."""

    code = "unauthenticated"


class ForbiddenError(RegistryError):
    """The caller is known, but the caller or the token lacks the permission."""

    code = "forbidden"


class RateLimitError(RegistryError):
    """Too many requests for now; retry after ``retry_after`` seconds."""

    code = "rate_limit"

    def __init__(self, message: str, *, retry_after: int = 1, hint: str = "") -> None:
        """Store the message and the seconds to wait."""
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class OfflineError(RegistryError):
    """The network would be needed, and the user switched it off."""

    code = "offline"


class UnreachableError(RegistryError):
    """A connection failed or broke, or the server cannot answer now; a retry may work."""

    code = "unreachable"

    def __init__(
        self, message: str, *, sent: bool = True, retry_after: float | None = None, hint: str = ""
    ) -> None:
        """Store whether the request may have arrived, and the pause that the server asks for."""
        super().__init__(message, hint=hint)
        self.sent = sent
        self.retry_after = retry_after


class BudgetError(ExpertError):
    """A memory, disk or quota limit would be exceeded."""

    code = "budget"


class DiskFullError(BudgetError):
    """The disk is full."""

    code = "disk_full"


class TooLargeError(BudgetError):
    """One object is larger than the limit for its kind."""

    code = "too_large"


class DeviceError(ExpertError):
    """A device failed; a process whose device failed cannot go on with it."""

    code = "device"


class StoreError(ExpertError):
    """The store cannot be used: read-only, locked for too long or damaged."""

    code = "store"


class InvalidPackageError(ExpertError):
    """A package or an input file is malformed; carries all problems found, not the first."""

    code = "invalid_package"

    def __init__(self, what: str, problems: Iterable[str], *, hint: str = "") -> None:
        """Describe what is wrong with ``what``, one line per problem."""
        self.what = what
        self.problems = tuple(problems)
        body = (
            self.problems[0]
            if len(self.problems) == 1
            else f"{len(self.problems)} problems\n" + "\n".join(f"  - {p}" for p in self.problems)
        )
        super().__init__(f"{what}: {body}", hint=hint)


def combine_errors(what: str, errors: Sequence[ExpertError]) -> ExpertError:
    """Return several errors as one of the first one's class; a single one stays as it is.

    Each is a line with its own hint.
    """
    if len(errors) == 1:
        return errors[0]
    lines = [f"{e.message} ({e.hint})" if e.hint else e.message for e in errors]
    hint = "each line says how; then try again"
    kind = type(errors[0])
    if issubclass(kind, InvalidPackageError):
        return InvalidPackageError(what, lines, hint=hint)
    body = "\n".join(f"  - {line}" for line in lines)
    return kind(f"{what}: {len(lines)} problems\n{body}", hint=hint)


class NoAnswerError(ExpertError):
    """A job ended before any part of its answer existed."""

    code = "no_answer"


class TimedOutError(NoAnswerError):
    """The time allowed for an answer ran out before the answer began."""

    code = "timeout"


class CancelledError(NoAnswerError):
    """The caller no longer wants the answer."""

    code = "cancelled"


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE_PATTERN = re.compile(f"[{_UNSAFE}]")
_LINE_END = re.compile("[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029]")


def replace_unsafe(text: str, replacement: str = REPLACEMENT) -> str:
    """Return a text of the same length without unsafe characters; line feeds and tabs stay."""
    return _UNSAFE_PATTERN.sub(replacement, text)


def to_single_line(text: str, replacement: str = REPLACEMENT) -> str:
    """Return a text of the same length on one line: tabs and line ends become spaces.

    A second line of foreign text could be mistaken for one of ours.
    """
    return replace_unsafe(_LINE_END.sub(" ", text), replacement)


_SECRET = re.compile(r"(xp[tsk]_|Bearer\s+|Basic\s+)[\w.~+/=-]{4,}", re.IGNORECASE)


def hide_secrets(text: str) -> str:
    """Return a text with ``***`` in place of tokens, API keys and HTTP credentials."""
    return _SECRET.sub(r"\1***", text)


MAX_ERROR_TEXT = 1000


def sanitise_error_text(text: str) -> str:
    """Return an error text that clients may show: bounded, without control characters."""
    shown = replace_unsafe(text[: MAX_ERROR_TEXT + 1], "?").replace("\t", " ")
    return shown if len(shown) <= MAX_ERROR_TEXT else f"{shown[:MAX_ERROR_TEXT]}…"


def sanitise_text(text: str, limit: int = MAX_ERROR_TEXT) -> str:
    """Return a text of a server as it may be printed: bounded, one line, printable."""
    clean = " ".join(to_single_line(text[: limit + 1], " ").split())
    return clean if len(text) <= limit else f"{clean[:limit]}…"


Notify = Callable[[str], None]
"""Called with a sentence for the user, who waits for something."""
WARNING_PREFIX = "warning: "
"""Begins a sentence that is a warning."""


CountProgress = Callable[[int, int], None]
"""Called with the number of items done, and of all."""


def ignore_count(done: int, total: int) -> None:
    """Ignore the numbers."""


def ignore_notification(_: str) -> None:
    """Ignore the sentence."""


def format_install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation, for a shell.

    It names this interpreter, and where expertctl was installed from if pip recorded that: a name
    alone would be looked up in an index, where there may be no such package.
    """
    import shlex
    import sys
    from importlib.util import find_spec

    pip = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is None:  # in environments that uv made
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *_build_requirement(f"[{','.join(extras)}]")])


def _build_requirement(extras: str) -> list[str]:
    """Return the arguments of pip for this installation; see PEP 610 for its record."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        record = json.loads(distribution("expertctl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        record = {}
    address = str(record.get("url", ""))
    if record.get("dir_info", {}).get("editable"):
        return ["-e", url2pathname(urlsplit(address).path) + extras]
    if "vcs_info" in record:
        source = record["vcs_info"]
        address = f"{source['vcs']}+{address}@{source['commit_id']}"
    return [f"expertctl{extras} @ {address}" if address else f"expertctl{extras}"]
