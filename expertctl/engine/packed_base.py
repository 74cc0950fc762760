"""A base in packed matrices: what the kernels read; queries, keys and values lie in one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.packed import PackedMatrix, pack
from expertctl.engine.kernels.scheme import Scheme
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig

Numbers = np.ndarray[Any, Any]
ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer; biases and norms are float32, or None."""

    input_norm: Numbers
    inputs: PackedMatrix
    input_bias: Numbers | None
    query_norm: Numbers | None
    key_norm: Numbers | None
    output: PackedMatrix
    output_bias: Numbers | None
    mlp_norm: Numbers
    gate_up: PackedMatrix
    gate_up_bias: Numbers | None
    down: PackedMatrix
    down_bias: Numbers | None
    window: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices and vectors."""
        parts = (getattr(self, field) for field in self.__slots__)
        return sum(part.nbytes for part in parts if isinstance(part, PackedMatrix | np.ndarray))


@dataclass(frozen=True, slots=True, eq=False)
class PackedBase:
    """A base, packed; a tied head is the embedding."""

    config: ModelConfig
    scheme: Scheme
    embedding: PackedMatrix
    head: PackedMatrix
    norm: Numbers
    layers: tuple[PackedLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and vectors, each once."""
        heads = 0 if self.head is self.embedding else self.head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + heads + self.norm.nbytes + layers


def pack_base(config: ModelConfig, weights: BaseWeights, scheme: Scheme) -> PackedBase:
    """Pack a base that was read.

    Raises:
        IncompatibleError: for heads or a middle of the MLP that do not fill blocks.
    """
    _check_sizes(config)
    packer = _Packer(weights, scheme)
    embedding = packer.matrix(EMBEDDING)
    head = packer.matrix(HEAD) if HEAD in weights.tensors else embedding
    layers = tuple(packer.layer(config, number) for number in range(config.layers))
    return PackedBase(config, scheme, embedding, head, packer.vector("model.norm.weight"), layers)


def _check_sizes(config: ModelConfig) -> None:
    """Check that what lies in one matrix with others begins a block there."""
    sizes = {"head_dim": config.head_dim, "intermediate_size": config.intermediate_size}
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % LANES]
    if wrong:
        raise IncompatibleError(
            f"the kernels of this machine cannot run this base: {' and '.join(wrong)}, "
            f"not a multiple of {LANES}",
            hint="try --engine transformers, which runs bases of every size, with one expert",
        )


class _Packer:
    def __init__(self, weights: BaseWeights, scheme: Scheme) -> None:
        self._tensors, self._scheme = weights.tensors, scheme

    def layer(self, config: ModelConfig, number: int) -> PackedLayer:
        at = f"model.layers.{number}"
        return PackedLayer(
            input_norm=self.vector(f"{at}.input_layernorm.weight"),
            inputs=self.matrix(*_weights(at, ATTENTION_INPUTS)),
            input_bias=self._biases(at, ATTENTION_INPUTS),
            query_norm=self._optional(f"{at}.self_attn.q_norm.weight"),
            key_norm=self._optional(f"{at}.self_attn.k_norm.weight"),
            output=self.matrix(f"{at}.self_attn.o_proj.weight"),
            output_bias=self._biases(at, ("self_attn.o_proj",)),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            gate_up=self.matrix(*_weights(at, MLP_INPUTS)),
            gate_up_bias=self._biases(at, MLP_INPUTS),
            down=self.matrix(f"{at}.mlp.down_proj.weight"),
            down_bias=self._biases(at, ("mlp.down_proj",)),
            window=config.windows[number],
        )

    def matrix(self, *names: str) -> PackedMatrix:
        """Pack some matrices as one, their rows behind each other."""
        stored = [_numbers(self._tensors[name], self._scheme) for name in names]
        return pack(np.concatenate(stored) if len(stored) > 1 else stored[0], self._scheme)

    def vector(self, name: str) -> Numbers:
        return np.ascontiguousarray(self._tensors[name].float().numpy())

    def _optional(self, name: str) -> Numbers | None:
        return self.vector(name) if name in self._tensors else None

    def _biases(self, at: str, modules: tuple[str, ...]) -> Numbers | None:
        found = [self._optional(f"{at}.{module}.bias") for module in modules]
        there = [bias for bias in found if bias is not None]
        return np.concatenate(there) if len(there) == len(modules) else None


def _weights(at: str, modules: tuple[str, ...]) -> Iterator[str]:
    return (f"{at}.{module}.weight" for module in modules)


def _numbers(matrix: Tensor, scheme: Scheme) -> Numbers:
    """Return a matrix as it is packed: bfloat16 as uint16 where it stays what it is."""
    if matrix.dtype is torch.bfloat16 and scheme is Scheme.BFLOAT16:
        return matrix.view(torch.uint16).numpy()
    return matrix.float().numpy()
