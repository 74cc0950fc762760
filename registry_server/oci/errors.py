"""The error codes of the OCI distribution specification, and the statuses that go with them."""

from collections.abc import Mapping
from enum import StrEnum

from expertctl.errors import ExpertError


class OciCode(StrEnum):
    """What ``errors[].code`` may say."""

    BLOB_UNKNOWN = "BLOB_UNKNOWN"
    BLOB_UPLOAD_INVALID = "BLOB_UPLOAD_INVALID"
    BLOB_UPLOAD_UNKNOWN = "BLOB_UPLOAD_UNKNOWN"
    DIGEST_INVALID = "DIGEST_INVALID"
    MANIFEST_BLOB_UNKNOWN = "MANIFEST_BLOB_UNKNOWN"
    MANIFEST_INVALID = "MANIFEST_INVALID"
    MANIFEST_UNKNOWN = "MANIFEST_UNKNOWN"
    NAME_INVALID = "NAME_INVALID"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    RANGE_INVALID = "RANGE_INVALID"
    SIZE_INVALID = "SIZE_INVALID"
    TAG_INVALID = "TAG_INVALID"
    PAGE_INVALID = "PAGINATION_NUMBER_INVALID"
    UNAUTHORIZED = "UNAUTHORIZED"
    DENIED = "DENIED"
    UNSUPPORTED = "UNSUPPORTED"
    TOO_MANY_REQUESTS = "TOOMANYREQUESTS"
    UNAVAILABLE = "UNAVAILABLE"
    UPLOAD_BUSY = "BLOB_UPLOAD_BUSY"
    UNKNOWN = "UNKNOWN"


OCI_STATUS: dict[OciCode, int] = {
    OciCode.BLOB_UNKNOWN: 404,
    OciCode.BLOB_UPLOAD_INVALID: 400,
    OciCode.BLOB_UPLOAD_UNKNOWN: 404,
    OciCode.DIGEST_INVALID: 400,
    OciCode.MANIFEST_BLOB_UNKNOWN: 404,
    OciCode.MANIFEST_INVALID: 400,
    OciCode.MANIFEST_UNKNOWN: 404,
    OciCode.NAME_INVALID: 400,
    OciCode.NAME_UNKNOWN: 404,
    OciCode.RANGE_INVALID: 416,
    OciCode.SIZE_INVALID: 400,
    OciCode.TAG_INVALID: 400,
    OciCode.PAGE_INVALID: 400,
    OciCode.UNAUTHORIZED: 401,
    OciCode.DENIED: 403,
    OciCode.UNSUPPORTED: 405,
    OciCode.TOO_MANY_REQUESTS: 429,
    OciCode.UNAVAILABLE: 503,
    OciCode.UPLOAD_BUSY: 409,
    OciCode.UNKNOWN: 500,
}
"""Statuses of the errors that this server finds itself."""

CODE_OF_STATUS: dict[int, OciCode] = {
    400: OciCode.MANIFEST_INVALID,
    401: OciCode.UNAUTHORIZED,
    403: OciCode.DENIED,
    404: OciCode.NAME_UNKNOWN,
    405: OciCode.UNSUPPORTED,
    408: OciCode.UNKNOWN,
    409: OciCode.DENIED,
    413: OciCode.SIZE_INVALID,
    414: OciCode.NAME_INVALID,
    415: OciCode.UNSUPPORTED,
    421: OciCode.UNSUPPORTED,
    429: OciCode.TOO_MANY_REQUESTS,
    431: OciCode.SIZE_INVALID,
    503: OciCode.UNAVAILABLE,
    507: OciCode.UNAVAILABLE,
}
"""Codes of errors from elsewhere, by their status."""


class OciError(ExpertError):
    """A request that the specification has a code for; ``headers`` go with the answer."""

    def __init__(
        self,
        oci_code: OciCode,
        message: str,
        *,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say what is wrong, under which code."""
        super().__init__(message, hint=hint)
        self.oci_code = oci_code
        self.headers = dict(headers or {})
