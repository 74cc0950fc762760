"""A base whose files become others and back, unseen, leaves nothing wrong behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine_config import Dtype
from expertctl.errors import BaseMismatchError
from expertctl.routing.planner import Planner
from expertctl.store.quantised_cache import open_quantised_cache
from tests.engine.test_local_engine import run
from tests.engine.test_packed_runs import BUDGET, ask, home, packed_packages
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "home", "packed_packages", "user_home"]


@contextmanager
def tampered(path: Path) -> Iterator[None]:
    """Change numbers of a file in place; size, time and inode stay."""
    before, data = path.stat(), path.read_bytes()
    half = (len(data) - 8192) // 8 * 4
    with path.open("r+b") as stream:
        stream.write(data[: -2 * half] + data[-half:] + data[-2 * half : -half])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    yield
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tokens(home: Planner, dtype: Dtype, *, verify_base: bool = False) -> tuple[int, ...]:
    engine = LocalEngine(home, budget=BUDGET, numpy_below=0)
    try:
        asked = ask("base alone", route={"dtype": dtype}, verify_base=verify_base)
        return tuple(run(engine, asked).generated.tokens)
    finally:
        engine.close()
        engine.check_integrity()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_copy_is_made_of_a_base_that_changed_unseen(
    dtype: Dtype, home: Planner, user_home: HomeFixture
) -> None:
    expected = tokens(home, dtype)
    (base,) = user_home.bases.list_bases()
    copies = open_quantised_cache(user_home.bases, base)
    assert copies is not None
    scheme = "int5" if dtype == "int4" else dtype  # what int4 is in a small base
    copies.path(scheme).unlink()
    (weights,) = base.path.glob("*.safetensors")
    with tampered(weights):
        with pytest.raises(BaseMismatchError, match="is not what was added: its weights are"):
            tokens(home, dtype)
        assert not copies.path(scheme).exists()
    assert tokens(home, dtype, verify_base=True) == expected
    assert tokens(home, dtype) == expected
    copies.check_integrity()


def test_what_could_not_be_kept_is_told_also_where_the_run_fails(
    home: Planner, user_home: HomeFixture
) -> None:
    tokens(home, "int8")
    (base,) = user_home.bases.list_bases()
    copies = open_quantised_cache(user_home.bases, base)
    assert copies is not None
    path = copies.path("int8")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    told: list[str] = []
    engine = LocalEngine(home, budget=BUDGET, numpy_below=0, tell=told.append)
    (weights,) = base.path.glob("*.safetensors")
    with tampered(weights), pytest.raises(BaseMismatchError):
        run(engine, ask("base alone", route={"dtype": "int8"}))
    assert told[-1] == f"warning: {path} is damaged, or not of this base: made again"
    assert engine.take_notes() == ()
    engine.close()
