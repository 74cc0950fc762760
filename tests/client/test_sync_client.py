"""The client for threads is written from the one for an event loop."""

import inspect

import pytest

from expertctl.client import AsyncExpertClient, ExpertClient
from expertctl.client.async_client import AsyncInferStream, AsyncJobsClient
from expertctl.client.client import InferStream, JobsClient
from scripts.sync_client import SOURCE, TARGET, convert


def test_the_client_for_threads_is_the_one_that_the_script_writes() -> None:
    expected = convert(SOURCE.read_text(encoding="utf-8"))
    assert TARGET.read_text(encoding="utf-8") == expected, "run `python -m scripts.sync_client`"


def test_nothing_asynchronous_is_left() -> None:
    code = TARGET.read_text(encoding="utf-8").split('"""\n', maxsplit=1)[1]
    assert [word for word in ("async", "await", "Async", "Awaitable") if word in code] == []


@pytest.mark.parametrize(
    ("sync", "other"),
    [
        (ExpertClient, AsyncExpertClient),
        (JobsClient, AsyncJobsClient),
        (InferStream, AsyncInferStream),
    ],
    ids=lambda kind: kind.__name__,
)
def test_both_clients_have_the_same_methods(sync: type, other: type) -> None:
    def parameters(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            {"aclose": "close"}.get(name, name): list(inspect.signature(method).parameters)
            for name, method in methods
            if not name.startswith("_")
        }

    assert parameters(sync) == parameters(other)
