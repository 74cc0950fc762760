"""A client of a generation server, for programs; imports neither torch nor numpy.

::

    from expertctl.client import ExpertClient

    with ExpertClient() as client:  # EXPERT_SERVER, else http://127.0.0.1:8000
        result = client.infer("Sort these numbers: 41, 17, 23", temperature=0.0)
        print(result.text, result.experts_used, result.latency_ms)

        with client.infer_stream("Write a haiku about rivers") as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.result.finish_reason)

        job = client.jobs.submit("Write a long story", priority=2)
        print(client.jobs.wait(job.job_id).demand_result().text)

`AsyncExpertClient` is the same with ``await`` and ``async with``. An API key comes from the
argument ``api_key`` or from ``EXPERT_API_KEY``; it is sent to that server only, and redirects are
never followed. Every failure is an error of `expertctl.errors`: `RateLimitError` when the server
is overloaded, `UnauthenticatedError` without a valid key, `NotFoundError` for an expert that is
not installed, `UnreachableError` when no server answers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertctl.client.async_client import AsyncExpertClient
    from expertctl.client.client import ExpertClient
    from expertctl.client.protocol import Chunk, InferOptions, MoeOptions, Retries, RouteOptions
    from expertctl.client.result import Expert, InferResult, Job, Model, MoeActivity, RouteResult

__all__ = [
    "AsyncExpertClient",
    "Chunk",
    "Expert",
    "ExpertClient",
    "InferOptions",
    "InferResult",
    "Job",
    "Model",
    "MoeActivity",
    "MoeOptions",
    "Retries",
    "RouteOptions",
    "RouteResult",
]

_MODULES = ("result", "protocol", "client", "async_client")


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: commands need the results without HTTP."""
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
