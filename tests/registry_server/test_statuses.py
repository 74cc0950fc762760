import pytest

from expertctl import errors
from registry_server.errors import STATUS_BY_CODE, OciCode, OciError, get_retry_after, get_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UsageError("x"), 400),
        (errors.InvalidPackageError("x", ["y"]), 400),
        (errors.SignatureError("x"), 400),
        (errors.RevokedError("x"), 400),
        (errors.UnauthenticatedError("x"), 401),
        (errors.ForbiddenError("x"), 403),
        (errors.BudgetError("x"), 403),
        (errors.NotFoundError("x"), 404),
        (errors.MissingDependencyError("x"), 404),
        (errors.ConflictError("x"), 409),
        (errors.TooLargeError("x"), 413),
        (errors.RateLimitError("x"), 429),
        (errors.ExpertError("x"), 500),
        (errors.RegistryError("x"), 502),
        (errors.StoreError("x"), 503),
        (errors.DiskFullError("x"), 507),
        (OciError(OciCode.UNSUPPORTED, "x"), 405),
    ],
)
def test_the_most_specific_class_decides(error: errors.ExpertError, status: int) -> None:
    assert get_status(error) == status


def test_every_code_of_oci_has_a_status() -> None:
    assert set(STATUS_BY_CODE) == set(OciCode)


def test_who_has_to_wait_is_told_how_long() -> None:
    assert get_retry_after(errors.RateLimitError("x", retry_after=7)) == 7
    assert (get_retry_after(errors.StoreError("x")) or 0) > 0
    assert get_retry_after(errors.ForbiddenError("x")) is None
