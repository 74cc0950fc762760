"""Reading an adapter: which tensor of a file belongs to which part, and nothing left over.

A tensor without a meaning is an error, and so is a file without any tensor that has one.
"""

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterSpec, Part, SoftPrompt, shortened
from expertctl.package.adapter_config import AdapterConfig
from expertctl.package.ia3_config import Ia3Config
from expertctl.package.ia3_parts import ia3_parts
from expertctl.package.lora_config import LoraConfig
from expertctl.package.lora_parts import dora_parts, lora_parts
from expertctl.package.soft_prompt_config import SoftPromptConfig
from expertctl.package.tensor_file import TensorTable
from expertctl.schema.manifest import Dtype

DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDINGS = "prompt_embeddings"


def adapter_spec(config: AdapterConfig, table: TensorTable, *, what: str) -> AdapterSpec:
    """Give every tensor of an adapter its meaning, and check it against the configuration.

    Raises:
        InvalidPackageError: with every problem.
    """
    problems: list[str] = []
    parts: list[Part] = []
    rank = tokens = None
    match config:
        case LoraConfig():
            read = dora_parts if config.use_dora else lora_parts
            parts += read(config, table, problems, what=what)
            rank = config.r
        case Ia3Config():
            parts += ia3_parts(config, table, problems)
        case SoftPromptConfig():
            parts += _soft_prompt(config, table, problems)
            tokens = config.tokens
    dtype = _dtype(table, problems)
    if problems:
        raise InvalidPackageError(what, shortened(problems))
    return AdapterSpec(config.kind, tuple(parts), dtype, rank, tokens, len(table.tensors))


def _soft_prompt(
    config: SoftPromptConfig, table: TensorTable, problems: list[str]
) -> list[SoftPrompt]:
    """Read the one tensor of a soft prompt, the same for prompt tuning and for P-tuning."""
    strange = [name for name in table.tensors if name != _EMBEDDINGS]
    problems += [f"{name}: a soft prompt has one tensor, {_EMBEDDINGS}" for name in strange]
    tensor = table.tensors.get(_EMBEDDINGS)
    if tensor is None:
        problems.append(f"{_EMBEDDINGS} is missing")
        return []
    match tensor.shape:
        case (config.tokens, width) if config.width in (None, width):
            return [SoftPrompt(_EMBEDDINGS, config.tokens, width)]
    stated = f"[{config.tokens}, {config.width or 'width'}]"
    problems.append(f"{_EMBEDDINGS}: {list(tensor.shape)}, the configuration says {stated}")
    return []


def _dtype(table: TensorTable, problems: list[str]) -> Dtype:
    names = {tensor.dtype for tensor in table.tensors.values()}
    known = [DTYPES[name] for name in names if name in DTYPES]
    if len(names) != 1 or not known:
        problems.append(
            f"tensors are {', '.join(sorted(names))}; one of F32, F16, BF16 for all is supported"
        )
    return known[0] if known else "float32"
