"""The engines that `decode` and `prefill` compare, all with a base in the shape of Qwen3-0.6B.

Each is opened in its own process and imports only what it needs; weights are random.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.engine_process import (
    Decode,
    OpenEngine,
    ReadMemory,
    ReadPrompt,
    Task,
    make_prompt_ids,
)
from benchmarks.gguf import width_name
from benchmarks.harness import Seconds, time_action
from benchmarks.inputs import make_base_config, make_config_document
from expertctl.engine.kernels.packed_format import Scheme

if TYPE_CHECKING:
    from expertctl.engine.cpu.packed_base import PackedBase

LLAMA_INSTALL = "pip install llama-cpp-python==0.3.36, built on this machine"
TRANSFORMERS_INSTALL = "pip install transformers"
CONTEXT = 1024
"""KV cache capacity of every engine, in tokens."""


def open_ours(scheme: Scheme, threads: Sequence[int], *, file: Path | None = None) -> OpenEngine:
    """Return a function that opens our own engine, with a thread pool per number of threads.

    The weights are random, or those of a GGUF ``file``.
    """
    return partial(_OurDenseEngine, scheme, tuple(threads), file)


def open_llama(path: Path, scheme: Scheme, *, flash: bool) -> OpenEngine:
    """Return a function that opens llama.cpp on a file of `write_gguf`."""
    return partial(_LlamaEngine, path, scheme, flash)


def open_transformers() -> OpenEngine:
    """Return a function that opens transformers in bfloat16."""
    return _TransformersDenseEngine


def has_llama() -> bool:
    """Whether llama.cpp is installed."""
    return find_spec("llama_cpp") is not None


def has_transformers() -> bool:
    """Whether transformers is installed."""
    return find_spec("transformers") is not None


class _OurDenseEngine:
    def __init__(self, scheme: Scheme, threads: Sequence[int], file: Path | None) -> None:
        from benchmarks.oracle import check_decoder
        from expertctl.engine.cpu.base_loader import (
            create_random_base,
            decode_bytes_per_token,
            list_matrices,
        )
        from expertctl.engine.cpu.decoder import PackedDecoder
        from expertctl.engine.kernels.microbenchmarks import MemoryReadBenchmark
        from expertctl.engine.kernels.thread_pool import ThreadPool
        from expertctl.engine.kv.block_pool import InterleavedPages, PagedKVCache

        self._crews = {count: ThreadPool(count) for count in threads}
        if file is None:
            for crew in self._crews.values():
                check_decoder(scheme, crew)
            base = create_random_base(make_base_config(), scheme)
        else:
            base = _load_gguf(file)
        self.resident_bytes = base.nbytes
        self._decoders = {n: PackedDecoder(base, crew) for n, crew in self._crews.items()}
        exact = scheme is Scheme.FLOAT32  # pages are those of `run`
        numbers = Scheme.FLOAT32 if exact else Scheme.FLOAT16
        self._cache = PagedKVCache(base.config, CONTEXT, layout=InterleavedPages(numbers))
        self._reading = MemoryReadBenchmark(list_matrices(base))
        self._vocabulary = base.config.vocab_size
        self.weight_bytes = decode_bytes_per_token(base)
        self.about = f"ours, {scheme.value}"

    def run(self, task: Task, threads: int) -> Seconds:
        """Run a task with so many workers; its results must be finite."""
        match task:
            case ReadMemory():
                return time_action(lambda: self._reading.run(self._crews[threads]))()
            case ReadPrompt(tokens):
                self._cache.reset()
                return self._check_scores(
                    self._make_reader([make_prompt_ids(tokens, self._vocabulary)], threads)
                )
            case Decode(tokens, context):
                self._cache.reset()
                self._make_reader([make_prompt_ids(context, self._vocabulary)], threads)()
                steps = [[token] for token in make_prompt_ids(tokens, self._vocabulary)]
                return self._check_scores(self._make_reader(steps, threads))

    def _make_reader(self, steps: Sequence[Sequence[int]], threads: int) -> Callable[[], Any]:
        """Return a function that processes tokens in each step, and returns the last logits."""
        decoder, cache = self._decoders[threads], self._cache

        def read() -> Any:
            for ids in steps:
                one = len(ids) == 1
                found = decoder.decode(ids[0], cache) if one else decoder.prefill(ids, cache)
            return found.logits

        return read

    def _check_scores(self, read: Callable[[], Any]) -> Seconds:
        scores: list[Any] = []
        seconds = time_action(lambda: scores.append(read()))()
        assert math.isfinite(float(scores[0].sum())), "scores are no numbers"
        self._cache.check_integrity()  # so are all keys and values on the way there
        return seconds


def _load_gguf(file: Path) -> "PackedBase":
    """Load a base with the blocks of a GGUF file as they are."""
    from expertctl.engine.cpu.base_loader import load_packed_base
    from expertctl.engine.cpu.schemes import choose_block_schemes
    from expertctl.package.base_tensors import read_storages
    from expertctl.package.gguf_base import derive_weight_files
    from expertctl.package.gguf_file import read_gguf_header
    from expertctl.package.model_config import read_model_config

    with TemporaryDirectory() as name:
        folder = Path(name)
        for each, data in derive_weight_files(read_gguf_header(file), file=str(file)).items():
            (folder / each).write_bytes(data)
        config = read_model_config(folder)
        choice = choose_block_schemes(config, read_storages(folder, config))
        return load_packed_base(folder, config, Scheme.INT8, schemes=choice.schemes)


class _LlamaEngine:
    def __init__(self, path: Path, scheme: Scheme, flash: bool) -> None:
        import llama_cpp.llama_cpp as library
        from llama_cpp._logger import set_verbose

        set_verbose(False)
        self._library: Any = library
        library.llama_backend_init()
        loading = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(path).encode(), loading)
        self.weight_bytes = path.stat().st_size
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, CONTEXT, 512
        params.flash_attn_type = int(flash)
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp does not open {path.name}"
        self._memory = library.llama_get_memory(self._context)
        self._vocabulary = make_base_config().vocab_size
        facts = library.llama_print_system_info().decode().strip(" |")
        self.about = f"llama.cpp {version('llama-cpp-python')} {width_name(scheme)}: {facts}"

    def run(self, task: Task, threads: int) -> Seconds:
        """Run a task with so many threads."""
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._library.llama_memory_clear(self._memory, False)
        match task:
            case ReadMemory():
                raise NotImplementedError
            case ReadPrompt(tokens):
                return time_action(self._make_reader(make_prompt_ids(tokens, self._vocabulary)))()
            case Decode(tokens, context):
                self._make_reader(make_prompt_ids(context, self._vocabulary))()
                steps = [
                    self._make_reader([token])
                    for token in make_prompt_ids(tokens, self._vocabulary)
                ]
                return time_action(lambda: [step() for step in steps])()

    def _make_reader(self, ids: Sequence[int]) -> Callable[[], None]:
        """Return a function that processes tokens and waits for the logits of the last one."""
        library, held = self._library, (ctypes.c_int32 * len(ids))(*ids)

        def read() -> None:
            failed = library.llama_decode(
                self._context, library.llama_batch_get_one(held, len(ids))
            )
            assert not failed, failed
            score = library.llama_get_logits_ith(self._context, -1)[0]
            assert math.isfinite(score)

        return read


class _TransformersDenseEngine:
    def __init__(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        configs: Any = AutoConfig
        models: Any = AutoModelForCausalLM
        config = configs.for_model(**make_config_document())
        model = models.from_config(config, dtype=torch.bfloat16)
        self._torch, self._model = torch, model.eval()
        self._vocabulary = config.vocab_size
        self.weight_bytes = sum(each.nbytes for each in model.parameters())
        attention = model.config._attn_implementation
        self.about = f"transformers {version('transformers')}, bfloat16, {attention} attention"

    def run(self, task: Task, threads: int) -> Seconds:
        """Run a task with so many threads."""
        from transformers import DynamicCache

        self._torch.set_num_threads(threads)
        cache = DynamicCache(config=self._model.config)
        match task:
            case ReadMemory():
                raise NotImplementedError
            case ReadPrompt(tokens):
                ids = make_prompt_ids(tokens, self._vocabulary)
                return time_action(lambda: self._read(ids, cache))()
            case Decode(tokens, context):
                self._read(make_prompt_ids(context, self._vocabulary), cache)
                ids = make_prompt_ids(tokens, self._vocabulary)
                return time_action(lambda: self._read_each(ids, cache))()

    def _read_each(self, ids: Sequence[int], cache: object) -> None:
        for token in ids:
            self._read([token], cache)

    def _read(self, ids: Sequence[int], cache: object) -> None:
        torch = self._torch
        with torch.inference_mode():
            self._model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
