"""llama.cpp's formats of a base: written by its own quantiser, and their logits, by its C API.

`LlamaBase` computes like llama.cpp's programs: flash attention where it chooses it, and keys and
values in float16. Importing this module needs no llama.cpp.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

LLAMA_FORMATS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0")
"""Formats from the largest."""
CONTEXT = 1024

Numbers = np.ndarray[Any, Any]


def quantise(source: Path, name: str, *, threads: int = 2) -> Path:
    """Write a float32 GGUF file in a format beside it, unless it exists; return its path."""
    path = source.with_name(f"{source.name.removesuffix('.f32.gguf')}.{name}.gguf")
    if path.exists():
        return path
    library = _open_library()
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, getattr(library, f"LLAMA_FTYPE_MOSTLY_{name}")
    partial = path.with_suffix(".partial")
    failed = library.llama_model_quantize(
        str(source).encode(), str(partial).encode(), ctypes.byref(params)
    )
    assert not failed, f"llama.cpp does not write {name}"
    partial.replace(path)
    return path


class LlamaBase:
    """A GGUF file in llama.cpp; use with ``with``."""

    def __init__(self, path: Path, *, threads: int = 2) -> None:
        """Name the file; it is opened by ``with``."""
        self._path, self._threads = path, threads

    def __enter__(self) -> Self:
        """Load the weights."""
        library = self._library = _open_library()
        loading = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(self._path).encode(), loading)
        assert self._model, f"llama.cpp does not read {self._path.name}"
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_ubatch = 512
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp does not open {self._path.name}"
        self._memory = library.llama_get_memory(self._context)
        words = library.llama_model_get_vocab(self._model)
        self.vocabulary = int(library.llama_vocab_n_tokens(words))
        self.set_threads(self._threads)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free everything."""
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return int(self._library.llama_model_size(self._model))

    def set_threads(self, count: int) -> None:
        """Compute with so many threads."""
        self._library.llama_set_n_threads(self._context, count, count)

    def clear(self) -> None:
        """Forget all tokens."""
        self._library.llama_memory_clear(self._memory, False)

    def score(self, ids: Sequence[int]) -> Numbers:
        """Process a text from its beginning; return all logits, float32 [tokens, vocab]."""
        self.clear()
        library, count = self._library, len(ids)
        batch = library.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for place, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, place
                batch.n_seq_id[place], batch.logits[place] = 1, 1
                batch.seq_id[place][0] = 0
            failed = library.llama_decode(self._context, batch)
            assert not failed, failed
        finally:
            library.llama_batch_free(batch)
        logits = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (count, self.vocabulary)).copy()

    def process(self, ids: Sequence[int]) -> Numbers:
        """Process further tokens; return the logits of the last one, float32 [vocab], not owned."""
        library, held = self._library, (ctypes.c_int32 * len(ids))(*ids)
        failed = library.llama_decode(self._context, library.llama_batch_get_one(held, len(ids)))
        assert not failed, failed
        logits = library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self.vocabulary,))

    def answer(self, ids: Sequence[int], *, tokens: int, end: int) -> list[int]:
        """Return the greedy answer to a prompt, without the token that ends it."""
        self.clear()
        found, token = list[int](), int(self.process(ids).argmax())
        while token != end and len(found) < tokens:
            found.append(token)
            token = int(self.process([token]).argmax())
        return found


def _open_library() -> Any:
    """Import llama.cpp, which logs nothing from now on."""
    import llama_cpp.llama_cpp as library

    library.llama_log_set(_make_silent_logger(), None)
    library.llama_backend_init()
    return library


@cache
def _make_silent_logger() -> Any:
    """Return the same callback each time: llama.cpp keeps its address."""
    import llama_cpp.llama_cpp as library

    logger: Any = library.llama_log_callback
    return logger(lambda level, text, data: None)
