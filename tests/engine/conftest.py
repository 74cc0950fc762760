"""One torch thread, the same numbers for each test, tiny models of transformers as oracle."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache, KVCacheFactory
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine import reference_models
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
"""Dense bases."""
TOLERANCE = 1e-5
FLOAT32_CACHE = KVCacheFactory(
    make=lambda wanted: KVCache(wanted.config, wanted.capacity),
    nbytes=lambda wanted: wanted.config.count_kv_bytes(wanted.capacity, itemsize=4),
)
HAS_CUDA = torch.cuda.is_available()
KERNEL_SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 48, "intermediate_size": 80}
"""Sizes that fill the blocks of kernels."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Leave the other cores to other tests."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on those before it."""
    if HAS_CUDA:
        torch.manual_seed(0)
    else:  # asking every kind of device takes a millisecond, thousands of times
        torch.default_generator.manual_seed(0)


@dataclass(frozen=True)
class ReferenceModel:
    """A random model as transformers runs it, and the directory it was saved to."""

    directory: Path
    model: Any

    def compute_logits(self, ids: list[int]) -> torch.Tensor:
        """Scores after each token, [tokens, vocab], of one forward pass over the whole text."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    def load_decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        config = read_model_config(self.directory)
        return Decoder(config, load_base_weights(self.directory, config, dtype=dtype))


MakeReferenceModel = Callable[..., ReferenceModel]


def build_reference_model(
    directory: Path, arch: str = "qwen3", *, seed: int = 0, **config: Any
) -> ReferenceModel:
    config_class, model_class = {**CLASSES, **reference_models.ROUTED_CLASSES}[arch]
    values: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **({"sliding_window": None} if arch == "mistral" else {}),
        **reference_models.ROUTED_CONFIGS.get(arch, {}),
        **config,
    }
    model = model_class(config_class(**values)).eval()
    randomise_parameters(model, seed)
    model.save_pretrained(directory)
    return ReferenceModel(directory, model)


def randomise_parameters(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter values of order one; biases and norms begin as zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
        reference_models.randomise_router_bias(model, generator)


@pytest.fixture
def oracle(tmp_path: Path) -> MakeReferenceModel:
    """Make a random model: ``oracle("llama", attention_bias=True)``."""
    return lambda arch="qwen3", **config: build_reference_model(tmp_path / "model", arch, **config)


@pytest.fixture(scope="session")
def shared_oracle(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """One Qwen3 model for tests that only read it."""
    return build_reference_model(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="module")
def crew() -> Iterator[ThreadPool]:
    """Two who compute."""
    crew = ThreadPool(2)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """One model for kernels, which tests only read."""
    directory = tmp_path_factory.mktemp("qwen3") / "model"
    return build_reference_model(directory, max_position_embeddings=256, **KERNEL_SIZES)


def run_decoder(
    decoder: Decoder, ids: list[int], *, prefill: int, capacity: int = 40, **options: Any
) -> torch.Tensor:
    """Scores from the last prompt token on, [1 + decoded, vocab]."""
    cache = KVCache(decoder.config, capacity)
    rows = [decoder.prefill(ids[:prefill], cache, **options).logits]
    rows += [decoder.decode(token, cache).logits for token in ids[prefill:]]
    cache.check_integrity()
    return stack_logits(rows)


def stack_logits(rows: Iterable[AnyArray | torch.Tensor], *, dim: int = 0) -> torch.Tensor:
    """Return logits of our decoders as a tensor, to compare with those of torch."""
    return torch.from_numpy(np.stack([np.asarray(row) for row in rows], axis=dim))


def assert_same_logits(
    ours: AnyArray | torch.Tensor, theirs: AnyArray | torch.Tensor, *, relative: bool = False
) -> None:
    """Compare absolutely, or relative to the largest of their logits."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    assert ours.shape == theirs.shape
    assert float(theirs.abs().max()) > 0.5, "the numbers are too small for an absolute tolerance"
    largest = float(theirs.abs().max()) if relative else 1.0
    assert float((ours - theirs).abs().max()) <= TOLERANCE * largest
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
