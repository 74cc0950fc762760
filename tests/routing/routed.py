"""Prompts routed among a few experts made in memory, lexically."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from expertctl.routing.candidate import Candidate, Installed
from expertctl.routing.router import RoutingResult
from expertctl.schema.manifest import AdapterEntry
from tests.routing.experts import installed, manifest

SORT = ("Sort these numbers: 41, 7, 23", "Put 41, 7, 23 in ascending order")
QUERY = ("Write an SQL query for the name of users with age over 30",)
PROMPT = "Sort these numbers: 8, 3, 99"
Router = Callable[..., RoutingResult]
"""Experts, and what a request says beside ``PROMPT``, in; see ``conftest.py``."""


def sorting(name: str = "acme/sort", version: str = "1.0.0", **kwargs: Any) -> Installed:
    keys = ("signer", "revoked", "size")
    place = {key: kwargs.pop(key) for key in keys if key in kwargs}
    kwargs.setdefault("examples", SORT)
    description = kwargs.pop("description", "Sorts numbers.")
    return installed(manifest(name, version, description=description, **kwargs), **place)


def sql(name: str = "acme/sql", version: str = "1.0.0", **kwargs: Any) -> Installed:
    return sorting(name, version, examples=QUERY, description="Writes SQL queries.", **kwargs)


def refs(result: RoutingResult) -> list[str]:
    return [expert.ref for expert in result.plan.experts]


def of(result: RoutingResult, name: str) -> Candidate:
    return next(c for c in result.candidates if c.expert.ref.startswith(name))


def soft(name: str, tokens: int) -> Installed:
    """An expert for the prompt, with a soft prompt."""
    plain = sorting(name)
    entry = AdapterEntry("soft_prompt", "p.safetensors", "p.json", "float32", 1, tokens=tokens)
    return replace(plain, manifest=replace(plain.manifest, adapters=(entry,)))
