"""The ``Authorization`` header: the one place where a request may carry a secret.

Bearer carries the token itself; Basic carries it as the password, for clients that know nothing
else, and its user name is not looked at. Secrets in the URL or in cookies are ignored.
"""

import base64
import binascii

from starlette.datastructures import Headers

MAX_HEADER = 16_000
_EMPTY_BASIC = "basic og=="


def names_nobody(headers: Headers) -> bool:
    """Tell whether a request carries no login: no header, or Basic with neither name nor secret.

    That is what skopeo sends where it has no login and was told that Basic will do.
    """
    values = headers.getlist("authorization")
    return not values or (len(values) == 1 and values[0].lower() == _EMPTY_BASIC)


def secret_of(headers: Headers) -> str | None:
    """Return the secret of a request; None when the header is neither of the two kinds."""
    values = headers.getlist("authorization")
    if len(values) != 1 or len(values[0]) > MAX_HEADER or not values[0].isascii():
        return None
    scheme, _, value = values[0].partition(" ")
    return _secret(scheme.lower(), value.strip(" "))


def _secret(scheme: str, value: str) -> str | None:
    if scheme == "bearer":
        return value
    if scheme != "basic":
        return None
    try:
        pair = base64.b64decode(value, validate=True).decode("ascii")
    except (ValueError, binascii.Error):
        return None
    return pair.partition(":")[2]
