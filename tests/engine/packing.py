"""Pack a base that torch holds, as an oracle for bases that are packed from their files."""

from expertctl.engine.cpu.packed_base import PackedBase, allocate_base, write_tensor
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import ModelConfig


def pack_base(config: ModelConfig, weights: BaseWeights, scheme: Scheme) -> PackedBase:
    """Pack every tensor of a base into its place.

    Raises:
        IncompatibleError: for head or MLP sizes that do not fill blocks.
    """
    base = allocate_base(config, scheme)
    for name, place in base.tensor_places().items():
        write_tensor(place, to_array(weights.tensors[name]))
    return base
