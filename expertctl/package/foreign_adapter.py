"""Adapters that other tools saved, written as PEFT saves them.

`open_adapter` yields a folder with ``adapter_model.safetensors`` and, if it differs, with
``adapter_config.json``. They take the place of the files in the directory, which is then built like
any other, so everything is checked once, by the strict readers. The same files always give the same
bytes.

*MLX* (``adapters.safetensors`` and its own ``adapter_config.json``) stores A and B transposed,
``lora_a`` [in, rank] and ``lora_b`` [rank, out], multiplies their product by ``scale``, and calls
the magnitude of DoRA ``m``. Its stacks of routed experts hold ``lora_a`` [experts, rank, in] and
``lora_b`` [experts, out, rank], and become a LoRA for each expert.

*Names.* Wrappers of trainers leave their names inside tensor names, and some loops save the name of
the adapter as well. Such parts are removed where the meaning is certain: no two tensors may get the
same name.

*Pickles* (``adapter_model.bin``) are read by `expertctl.package.pickled_weights` if the user allows
it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.package.adapter import MAX_CONFIG_BYTES, PEFT_PREFIX
from expertctl.package.adapter_weights import encode_header, lay_out_tensors
from expertctl.package.directory import (
    CONFIG_PATH,
    PICKLES,
    WEIGHTS_PATH,
    SourceFile,
    find_adapter_file,
    find_source_file,
    list_source_names,
)
from expertctl.package.pickled_weights import convert_pickle
from expertctl.package.tensor_file import DTYPE_BYTES, TensorInfo, TensorTable, read_header
from expertctl.schema.strict_json import JsonObject, load_object

MLX_WEIGHTS = "adapters.safetensors"
_MLX_FIELDS = frozenset({"lora_parameters", "fine_tune_type", "adapter_path", "lora_layers"})
_MAX_SCALE = 1e4
_MAX_EXPERTS = 4096
_WORDS: Mapping[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor as PEFT names it, and how its bytes are read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[BinaryIO], bytes]
    """Returns its bytes; the argument is the weights file."""


@dataclass(frozen=True, slots=True)
class ForeignAdapter:
    """An adapter of another tool, in PEFT's terms."""

    source: SourceFile
    """The weights file."""
    tensors: tuple[ForeignTensor, ...]
    config: JsonObject | None
    """PEFT's configuration; None: that of the folder is PEFT's already."""
    note: str
    """What was converted, for the user."""


@contextmanager
def open_adapter(
    directory: Path, *, reads_pickle: bool = False
) -> Iterator[tuple[Path | None, tuple[str, ...]]]:
    """Yield a folder with the files of an adapter that had to be converted, and notes; None: none.

    With ``reads_pickle``, a folder that has only ``adapter_model.bin`` is read from it.

    Raises:
        InvalidPackageError: for an adapter of a known tool that has no meaning in PEFT, or a pickle
            with anything but tensors.
    """
    if not directory.is_dir():
        yield None, ()
        return
    with ExitStack() as stack:
        notes, converted = list[str](), None
        if reads_pickle and (pickled := _find_pickle(directory)):
            converted = _make_folder(stack)
            convert_pickle(pickled, converted / WEIGHTS_PATH)
            notes.append(f"{pickled.name}: its tensors were read in a restricted process")
        if found := read_foreign_adapter(directory, converted):
            converted = _make_folder(stack)
            write_adapter(found, converted)
            notes.append(found.note)
        yield converted, tuple(notes)


def _make_folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(TemporaryDirectory(prefix="expertctl-")))


def _find_pickle(directory: Path) -> SourceFile | None:
    """Return the pickled weights of a folder that has no others."""
    names = list_source_names(directory)
    pickles = [name for name in PICKLES if name in names]
    if not pickles or WEIGHTS_PATH in names:
        return None
    return find_source_file(directory, pickles[0])


def read_foreign_adapter(directory: Path, converted: Path | None = None) -> ForeignAdapter | None:
    """Return the adapter in a directory if it is not as PEFT saves it; None: it is, or is unknown.

    Files in ``converted`` take the place of those in the directory.

    Raises:
        InvalidPackageError: for an adapter of a known tool that has no meaning in PEFT.
    """
    config = _read_config(directory)
    if is_mlx(list_source_names(directory), config):
        return _read_mlx(directory, config)
    return None if config is None else _read_renamed(directory, converted)


def is_mlx(names: Sequence[str], config: JsonObject | None) -> bool:
    """Tell whether files and configuration are those of an MLX adapter."""
    if config is not None and "peft_type" in config:
        return False
    return MLX_WEIGHTS in names or bool(config and _MLX_FIELDS.intersection(config))


def write_adapter(found: ForeignAdapter, folder: Path) -> None:
    """Write the weights as PEFT saves them into a folder, and the configuration if it differs."""
    if found.config is not None:
        text = json.dumps(found.config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_PATH).write_text(text, encoding="utf-8")
    infos = {each.name: TensorInfo(each.dtype, each.shape, 0, 0) for each in found.tensors}
    table = lay_out_tensors(TensorTable(infos, 0, 0), None)
    with found.source.open() as stream, (folder / WEIGHTS_PATH).open("xb") as output:
        output.write(encode_header(table))
        for each in found.tensors:
            output.write(each.read(stream))


def _read_config(directory: Path) -> JsonObject | None:
    """Return the configuration; None if it is absent, or the strict reader will report it."""
    try:
        file = find_source_file(directory, CONFIG_PATH)
        if file is None:
            return None
        data = file.read(max_bytes=MAX_CONFIG_BYTES)
        return load_object(data, what=CONFIG_PATH, max_bytes=MAX_CONFIG_BYTES)
    except InvalidPackageError:
        return None


def _read_mlx(directory: Path, config: JsonObject | None) -> ForeignAdapter:
    what = str(directory)
    if config is None:
        hint = f"{CONFIG_PATH} of mlx-lm states the scale; without it the adapter has no meaning"
        raise InvalidPackageError(what, [f"an MLX adapter without {CONFIG_PATH}"], hint=hint)
    kind = config.get("fine_tune_type") or "lora"
    if kind not in ("lora", "dora"):
        raise InvalidPackageError(
            what,
            [f"an MLX adapter of fine_tune_type {str(kind)[:40]!r}; lora and dora are supported"],
            hint="a fully trained model is a base: `expertctl base add DIR`",
        )
    rank, scale = _read_mlx_parameters(config, what)
    source = find_source_file(directory, MLX_WEIGHTS)
    if source is None:
        hint = "mlx-lm saves adapters.safetensors; convert an older adapters.npz with it"
        raise InvalidPackageError(what, [f"{MLX_WEIGHTS} is missing"], hint=hint)
    with source.open() as stream:
        table = read_header(stream, file_size=source.size, what=MLX_WEIGHTS)
    tensors = tuple(sorted(_iter_mlx_tensors(table), key=lambda each: each.name))
    modules = {_MLX_END.sub("", name) for name in table.tensors}
    model = config.get("model")
    peft: JsonObject = {
        "base_model_name_or_path": model if isinstance(model, str) else None,
        "bias": "none",
        "lora_alpha": scale * rank,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(list_targets(tensors)),
        "task_type": "CAUSAL_LM",
        "use_dora": kind == "dora",
    }
    note = f"converted from an MLX adapter of {len(modules)} modules: A and B transposed"
    return ForeignAdapter(
        source, tensors, peft, f"{note}, lora_alpha = scale * rank = {scale * rank:g}"
    )


def _read_mlx_parameters(config: JsonObject, what: str) -> tuple[int, float]:
    """Return rank and scale."""
    found = config.get("lora_parameters")
    fields = found if isinstance(found, dict) else {}
    rank, scale, alpha = fields.get("rank"), fields.get("scale"), fields.get("alpha")
    problems = []
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(f"{CONFIG_PATH}: lora_parameters.rank is missing, or not above 0")
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        problems.append(f"{CONFIG_PATH}: lora_parameters.scale is missing, or not a number")
    elif not 0 < scale <= _MAX_SCALE:
        problems.append(
            f"{CONFIG_PATH}: lora_parameters.scale is {scale:g}, not above 0 to {_MAX_SCALE:g}"
        )
    hint = ""
    if alpha is not None and alpha != rank:
        problems.append(f"{CONFIG_PATH}: lora_parameters has both alpha and scale")
        hint = (
            "early releases of mlx-lm multiply by scale * alpha / rank, later ones by scale:\n"
            "remove alpha, and let scale be the factor that it was trained with"
        )
    if problems:
        raise InvalidPackageError(what, problems, hint=hint)
    assert isinstance(rank, int), "checked"
    assert isinstance(scale, int | float), "checked"
    return rank, float(scale)


_MLX_END = re.compile(r"\.(lora_a|lora_b|m)$")
_SWITCH = ".switch_mlp."
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


def _iter_mlx_tensors(table: TensorTable) -> Iterator[ForeignTensor]:
    """Yield the tensors of PEFT that a file of MLX stands for."""
    for name, info in table.tensors.items():
        module, _, part = name.rpartition(".")
        if part == "m":
            yield _copy_tensor(table, info, f"{PEFT_PREFIX}{module}.lora_magnitude_vector")
        elif part not in ("lora_a", "lora_b"):
            yield _copy_tensor(table, info, name)  # reported by the strict reader
        elif len(info.shape) == 3 and _SWITCH in name and info.shape[0] <= _MAX_EXPERTS:
            yield from _split_experts(table, info, module, part)
        elif len(info.shape) == 2:
            yield _transpose_tensor(
                table, info, f"{PEFT_PREFIX}{module}.{_name_half(module, part)}"
            )
        else:
            yield _copy_tensor(table, info, f"{PEFT_PREFIX}{module}.{_name_half(module, part)}")


def _name_half(module: str, part: str) -> str:
    """Return PEFT's name for one of the two matrices of a module."""
    half = part[-1].upper()
    if module.rpartition(".")[2] in _EMBEDDINGS:
        return f"lora_embedding_{half}"
    return f"lora_{half}.weight"


def _split_experts(
    table: TensorTable, info: TensorInfo, module: str, part: str
) -> Iterator[ForeignTensor]:
    """Yield the matrices of each routed expert, which are stored as PEFT has them."""
    experts, *shape = info.shape
    size = math.prod(shape) * DTYPE_BYTES[info.dtype]
    for number in range(experts):
        name = module.replace(_SWITCH, f".experts.{number}.")
        begin = info.begin + number * size
        one = TensorInfo(info.dtype, tuple(shape), begin, begin + size)
        yield _copy_tensor(table, one, f"{PEFT_PREFIX}{name}.lora_{part[-1].upper()}.weight")


def _copy_tensor(table: TensorTable, info: TensorInfo, name: str) -> ForeignTensor:
    offset = table.data_offset + info.begin
    read = _make_reader(offset, info.end - info.begin)
    return ForeignTensor(name, info.dtype, info.shape, read)


def _transpose_tensor(table: TensorTable, info: TensorInfo, name: str) -> ForeignTensor:
    read_stored = _make_reader(table.data_offset + info.begin, info.end - info.begin)

    def read(stream: BinaryIO) -> bytes:
        words = np.frombuffer(read_stored(stream), _WORDS[DTYPE_BYTES[info.dtype]])
        return words.reshape(info.shape).T.tobytes()

    return ForeignTensor(name, info.dtype, info.shape[::-1], read)


def _make_reader(offset: int, size: int) -> Callable[[BinaryIO], bytes]:
    def read(stream: BinaryIO) -> bytes:
        stream.seek(offset)
        data = stream.read(size)
        if len(data) != size:
            raise InvalidPackageError("the weights", ["the file is cut short"])
        return data

    return read


def list_targets(tensors: Sequence[ForeignTensor]) -> list[str]:
    """Return the full names of all modules: PEFT takes suffixes as well, for every layer."""
    names = {_PEFT_END.sub("", each.name.removeprefix(PEFT_PREFIX)) for each in tensors}
    return sorted(names)


_PEFT_END = re.compile(r"\.(lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector)$")


_WRAPPER = re.compile(r"(?:^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LABELLED = re.compile(
    r"(?P<part>\.lora_[AB]|\.ia3_l|\.lora_magnitude_vector)\.(?P<label>(?!(weight|bias)$)[^.]+)"
    r"(?P<end>(\.weight)?)$"
)
_PART = re.compile(r"\.(lora_[AB]|ia3_l|lora_magnitude_vector)(\.|$)")
_DECODER = re.compile(
    r"(model|transformer|gpt_neox)\..+\.(lora_[AB]\.|ia3_l|lora_magnitude_vector)"
)


def _read_renamed(directory: Path, converted: Path | None) -> ForeignAdapter | None:
    """Return an adapter of PEFT whose tensor names a trainer changed; None for any other."""
    try:
        source = find_adapter_file(directory, WEIGHTS_PATH, converted)
        if source is None:
            return None
        with source.open() as stream:
            table = read_header(stream, file_size=source.size, what=WEIGHTS_PATH)
    except ExpertError:
        return None  # the strict reader reports it
    parts = [_LABELLED.search(name) for name in table.tensors if _PART.search(name)]
    is_one = len({None if found is None else found["label"] for found in parts}) == 1
    removed: dict[str, None] = {}
    renamed = {name: _clean_name(name, removed, unlabelled=is_one) for name in table.tensors}
    if not removed or len(set(renamed.values())) != len(renamed):
        return None
    tensors = tuple(
        _copy_tensor(table, info, renamed[name]) for name, info in table.tensors.items()
    )
    note = f"{WEIGHTS_PATH}: tensors are renamed as PEFT saves them: {', '.join(removed)}"
    return ForeignAdapter(source, tensors, None, note)


def _clean_name(name: str, removed: dict[str, None], *, unlabelled: bool) -> str:
    """Return a name as PEFT saves it; what was changed is added to ``removed``."""
    while name.startswith(f"{PEFT_PREFIX}base_model."):
        name = name.removeprefix(PEFT_PREFIX)
        removed[f"the doubled {PEFT_PREFIX!r}"] = None
    removed |= {f"without {wrapper!r}": None for wrapper in _WRAPPER.findall(name)}
    name = _WRAPPER.sub("", name)
    if unlabelled and (found := _LABELLED.search(name)):
        end = "" if "magnitude" in found["part"] else found["end"]
        name = name[: found.start()] + found["part"] + end
        removed[f"without the label {found['label'][:40]!r}"] = None
    if _DECODER.match(name):
        name = f"{PEFT_PREFIX}{name}"
        removed[f"with {PEFT_PREFIX!r}"] = None
    return name
