"""How often wrong secrets may be tried: limits that never hold up a right one.

A secret is looked up before any limit is asked, so a valid token gets through whatever else comes
from its address. A look-up costs one hash and one indexed read, and no read at all for what this
registry cannot have made. What is limited is what a wrong secret is answered: each beginning of a
secret on its own, so that a machine with an old token does not silence others at its address, and
all of an address together.
"""

from collections.abc import Callable
from dataclasses import dataclass

from expertctl.http.rates import Rates
from registry_server.access import sessions, tokens

ADDRESS_FACTOR = 5
"""How many times the failures of one beginning an address may have in all."""
BEGINNING = 12
"""How many characters of a secret tell it from others; a token has 35 more."""


@dataclass(frozen=True, slots=True)
class LoginFailures:
    """Failed logins of each address and beginning, and of each address."""

    _alike: Rates
    _of_address: Rates

    @classmethod
    def limited(cls, per_minute: int, clock: Callable[[], float]) -> "LoginFailures":
        """Allow so many failures per minute of one beginning at one address."""
        return cls(Rates(per_minute, clock), Rates(ADDRESS_FACTOR * per_minute, clock))

    def wait(self, address: str, secret: str | None) -> int:
        """Return the seconds until such a failure may happen again, 0 when it may now."""
        alike = self._alike.wait(_key(address, secret))
        return max(alike, self._of_address.wait(address))

    def count(self, address: str, secret: str | None) -> None:
        """Count one failure."""
        self._alike.take(_key(address, secret))
        self._of_address.take(address)


def beginning(secret: str | None) -> str:
    """Return what may be shown of a wrong secret: nothing unless it looks like one of ours."""
    known = secret is not None and secret.startswith((tokens.PREFIX, sessions.PREFIX))
    return secret[:BEGINNING] if secret is not None and known else ""


def _key(address: str, secret: str | None) -> str:
    return f"{address} {beginning(secret)}"
