"""The threads of numpy's products: set for a while, and left alone where nobody knows how."""

from pathlib import Path

import numpy as np
import pytest

from expertctl.engine.cpu import plain_backend
from expertctl.engine.cpu.plain_backend import get_blas_threads, use_blas_threads

KNOWN = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"] == "scipy-openblas"


def divide_by_zero(*, threads: int) -> None:
    with use_blas_threads(threads):
        assert get_blas_threads() == threads
        raise ZeroDivisionError


@pytest.mark.skipif(not KNOWN, reason="numpy was built with another library")
def test_threads_are_set_for_a_while() -> None:
    before = get_blas_threads()
    assert before is not None
    with use_blas_threads(1):
        assert get_blas_threads() == 1
        with pytest.raises(ZeroDivisionError):
            divide_by_zero(threads=2)
        assert get_blas_threads() == 1
    assert get_blas_threads() == before


def test_another_library_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_backend, "_FOLDERS", ())
    plain_backend._find_thread_functions.cache_clear()
    try:
        with use_blas_threads(1):
            assert get_blas_threads() is None
    finally:
        plain_backend._find_thread_functions.cache_clear()


def test_what_is_no_library_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libopenblas.txt").write_text("no library")
    monkeypatch.setattr(plain_backend, "_FOLDERS", (str(tmp_path),))
    plain_backend._find_thread_functions.cache_clear()
    try:
        assert get_blas_threads() is None
    finally:
        plain_backend._find_thread_functions.cache_clear()
