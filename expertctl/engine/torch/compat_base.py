"""Bases that run in transformers: any causal language model, from verified files.

transformers gets a configuration and tensors, never a folder: given a folder it would look for
adapters, other weight files and code in it, and contact the hub. Nothing is downloaded, and only
code of the installed libraries runs.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.torch.devices import use_torch_threads
from expertctl.engine.torch.weights import parse_torch_dtype
from expertctl.errors import (
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    format_install_command,
)
from expertctl.package.adapter import truncate_problems
from expertctl.package.base_model import (
    DEFAULT_MAX_POSITIONS,
    LENGTH_NAMES,
    ForeignConfig,
    parse_foreign_config,
)
from expertctl.package.base_tensors import read_foreign_tensors
from expertctl.package.config_document import CONFIG_FILE, read_config_document
from expertctl.package.stored_tensor import StoredTensor
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

_MARGIN = 8
"""A fraction ``1 / _MARGIN`` of the weights is added for loading and running."""
_FLOAT_BYTES = 4
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names that architectures use for their number of layers."""


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """The sizes in a configuration that determine the memory of a sequence."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int


@dataclass(frozen=True, slots=True)
class CompatBase:
    """A base whose files were checked against the store; no weights are in memory."""

    stored: StoredBase
    config: Any
    """The configuration object of transformers."""
    dimensions: ModelDimensions
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        numbers = sum(torch.Size(t.info.shape).numel() for t in self.tensors.values())
        return numbers * self.dtype.itemsize

    @property
    def context(self) -> int:
        """Context length in tokens, answer included."""
        return _find_context_length(self.config) or DEFAULT_MAX_POSITIONS

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Set torch's thread count inside a ``with`` block."""
        return use_torch_threads(count)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about this base."""
        if _find_context_length(self.config):
            return ()
        return (
            "the configuration of the base states no context length; "
            f"{DEFAULT_MAX_POSITIONS} tokens are allowed",
        )

    def kv_bytes(self, tokens: int) -> int:
        """Estimate the bytes of the keys and values of so many tokens."""
        sizes = self.dimensions
        row = sizes.layers * sizes.kv_heads * sizes.head_dim
        return 2 * row * self.dtype.itemsize * tokens

    def buffer_bytes(self, tokens: int) -> int:
        """Estimate the bytes needed to load the model and to run a pass over so many tokens."""
        wide = 16 * self.dimensions.hidden + self.dimensions.heads * tokens
        passing = tokens * wide * _FLOAT_BYTES + estimate_sample_bytes(self.dimensions.vocab)
        return self.weight_bytes // _MARGIN + passing


def open_compat_base(
    bases: BaseStore, stored: StoredBase, *, dtype: str, rehash: bool
) -> CompatBase:
    """Check the files of a base, by every byte with ``rehash``, and read the small ones.

    Raises:
        BaseMismatchError: when they differ from those that were registered.
        IncompatibleError: when the installed transformers does not support the model.
        NotFoundError: when transformers is not installed.
    """
    if rehash:
        bases.rehash(stored)
    else:
        bases.check(stored)
    what = str(stored.path / CONFIG_FILE)
    foreign = parse_foreign_config(read_config_document(stored.path), what=what)
    tensors = read_foreign_tensors(stored.path)
    _check_layer_count(foreign, len(tensors), what)
    config = load_config(foreign, what)
    sizes = _read_dimensions(config, what)
    tokenizer = Tokenizer.open(stored.path)
    return CompatBase(stored, config, sizes, tensors, tokenizer, parse_torch_dtype(dtype))


def load_model(base: CompatBase) -> Any:
    """Load the weights into memory; each of them must have its place in the model.

    Raises:
        InvalidPackageError: when they do not match the configuration.
    """
    tensors = _read_tensors(base.tensors)
    return build_model(base.config, tensors, dtype=base.dtype, name=base.stored.name)


def build_model(config: Any, tensors: dict[str, Tensor], *, dtype: torch.dtype, name: str) -> Any:
    """Return a model of transformers with these weights, none of which is trained.

    Raises:
        InvalidPackageError: when they do not match the configuration.
    """
    with offline_transformers():
        try:
            model, found = _find_model_class(config, name).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation="sdpa" if _supports_sdpa(config, name) else "eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except IncompatibleError:
            raise
        except Exception as error:  # each architecture's code raises its own errors
            problem = f"transformers cannot load it: {str(error)[:1000]}"
            raise InvalidPackageError(f"the base {name}", [problem]) from error
    _check_loaded(name, found)
    return model.requires_grad_(False).eval()


def _find_context_length(config: Any) -> int | None:
    """Return the first context length in a configuration; libraries use different names for it."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in LENGTH_NAMES)
    return next((int(n) for n in found if isinstance(n, int) and n > 0), None)


def load_config(config: ForeignConfig, what: str) -> Any:
    """Return the configuration object of transformers; raises as `open_compat_base`."""
    with offline_transformers():
        from transformers import CONFIG_MAPPING

        if config.architecture not in CONFIG_MAPPING:
            raise _make_unknown_error(what, config.architecture)
        try:
            return CONFIG_MAPPING[config.architecture].from_dict(dict(config.values))
        except Exception as error:  # its validation raises errors of several libraries
            problem = f"transformers cannot read it: {str(error)[:1000]}"
            raise InvalidPackageError(what, [problem]) from error


def _check_layer_count(config: ForeignConfig, tensors: int, what: str) -> None:
    """Refuse more layers than tensors before anything is allocated for each layer."""
    for name in _LAYERS:
        layers = config.values.get(name)
        if isinstance(layers, int) and layers > tensors:
            raise InvalidPackageError(what, [f"{layers} layers, but {tensors} tensors"])


def _read_dimensions(config: Any, what: str) -> ModelDimensions:
    """Read the sizes that memory depends on, before a model of that size is created."""
    text = config.get_text_config()

    def number(name: str, default: int = 0) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) and value > 0 else default

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    layers, vocab = number("num_hidden_layers"), number("vocab_size")
    if not (heads and hidden and layers and vocab):
        raise IncompatibleError(
            f"{what}: {config.model_type} states no number of layers, heads, features or tokens",
            hint="use a base that supports a KV cache",
        )
    dim = number("head_dim", -(-hidden // heads))
    return ModelDimensions(layers, heads, number("num_key_value_heads", heads), dim, hidden, vocab)


def _find_model_class(config: Any, name: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _make_unknown_error(name, config.model_type)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _make_unknown_error(what: str, architecture: str) -> IncompatibleError:
    return IncompatibleError(
        f"{what}: the installed transformers has no causal language model {architecture[:100]!r}",
        hint=f"upgrade it: {format_install_command('compat')} --upgrade",
    )


def _supports_sdpa(config: Any, name: str) -> bool:
    return bool(getattr(_find_model_class(config, name), "_supports_sdpa", False))


def _read_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read the listed tensors of the verified files, and no others."""
    found: dict[str, Tensor] = {}
    for path in sorted({tensor.path for tensor in tensors.values()}):
        try:
            opened: Any = safe_open(path, framework="pt", device="cpu")
            with opened as file:
                names = [name for name, tensor in tensors.items() if tensor.path == path]
                found |= {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            problem = f"not a readable safetensors file: {error}"
            raise InvalidPackageError(str(path), [problem]) from error
    return found


def _check_loaded(name: str, found: Mapping[str, Any]) -> None:
    problems = [f"missing tensor {key}" for key in sorted(found["missing_keys"])]
    problems += [f"unexpected tensor {key}" for key in sorted(found["unexpected_keys"])]
    problems += [f"tensor {key} has another shape" for key, *_ in sorted(found["mismatched_keys"])]
    problems += [str(message)[:200] for message in found.get("error_msgs", ())]
    if problems:
        raise InvalidPackageError(f"the base {name}", truncate_problems(problems))


@contextmanager
def offline_transformers() -> Iterator[None]:
    """Import and use transformers without terminal output and without the network.

    Raises:
        NotFoundError: when it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is first imported
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # a base was downloaded before
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"--engine transformers needs {error.name}, which is not installed",
            hint=format_install_command("compat"),
        ) from error
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
