"""What a file is that is not what its name says, told from its first bytes and never opened.

Git LFS pointers, pages of a website, pickles and empty files lie where adapters should, mostly
because a download or a clone did not bring the content.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HEAD_BYTES = 512
_LFS = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")
_PICKLE_HINT = (
    "convert it on the machine that trained it: load it with PEFT, then\n"
    "model.save_pretrained(DIR, safe_serialization=True)"
)
_MLX_HINT = (
    "an MLX adapter names its tensors otherwise, and stores them transposed:\n"
    "save it as a PEFT adapter (lora_a.T is lora_A, lora_b.T is lora_B), or train it with PEFT"
)
_MLX_FILES = ("adapters.safetensors", "adapters.npz")
_MLX_FIELDS = frozenset({"lora_parameters", "fine_tune_type", "adapter_path", "lora_layers"})


@dataclass(frozen=True, slots=True)
class OtherKind:
    """What a file is instead, and the way out."""

    problem: str
    hint: str


def other_kind(head: bytes, *, size: int) -> OtherKind | None:
    """Tell what a file of weights or a JSON file is where its first bytes show something else."""
    if size == 0:
        return OtherKind("the file is empty", "download or copy it again")
    if head.startswith(_LFS):
        return OtherKind(
            "a Git LFS pointer, not the file itself",
            "run `git lfs pull` in its repository, or download the file again",
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_HTML):
        return OtherKind(
            "an HTML page, not the file itself",
            "the download brought a web page: log in, or use the file's raw address",
        )
    if _is_pickle(head):
        return OtherKind("a pickle, and pickles are never opened", _PICKLE_HINT)
    if head.startswith(b"GGUF"):
        return OtherKind("a GGUF file", "build from the directory that PEFT saved the adapter to")
    return None


def pickled(name: str) -> OtherKind:
    """Say what to do about the weights of an adapter that were saved as a pickle."""
    return OtherKind(f"{name} is a pickle, and pickles are never opened", _PICKLE_HINT)


def mlx_folder(names: Sequence[str], config: object) -> OtherKind | None:
    """Tell whether the files, or the configuration, are those of an adapter that MLX made."""
    fields = _MLX_FIELDS.intersection(config) if isinstance(config, dict) else frozenset()
    peft = isinstance(config, dict) and "peft_type" in config
    if peft or not (fields or any(name in _MLX_FILES for name in names)):
        return None
    return OtherKind("an adapter of MLX, and only those of PEFT are packed", _MLX_HINT)


def _is_pickle(head: bytes) -> bool:
    """Recognise a pickle of protocol 2 to 5, and the zip archive that torch.save writes."""
    if head.startswith(b"PK\x03\x04"):
        return True
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5 and not _is_table(head)


def _is_table(head: bytes) -> bool:
    """Recognise a table of tensors: a length below 4 GiB in eight bytes, then a JSON object.

    The length may begin with the two bytes of a pickle, as that of 66,176 bytes does.
    """
    return head[4:9] == bytes(4) + b"{"
