"""Compatibility of experts and bases: the digests of decision 8, then module names and shapes."""

import shlex
from collections.abc import Mapping

from expertctl.errors import BaseMismatchError
from expertctl.package.adapter import (
    AdapterSpec,
    Dora,
    Ia3,
    Lora,
    Part,
    SoftPrompt,
    is_hub_name,
    truncate_problems,
)
from expertctl.package.base_model import HEAD_NAMES, BaseIdentity
from expertctl.package.base_tensors import explain_absent_module, find_base_name
from expertctl.schema.manifest import BaseRequirement, Manifest

HiddenSizes = Mapping[str, int]
"""Digest of an architecture → its hidden size, for the known bases."""
NO_HIDDEN_SIZES: HiddenSizes = {}

_INPUT_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj"})
_OUTPUT_PROJECTIONS = frozenset({"o_proj", "down_proj"})
_ACCEPT_HINT = "accept the risk with --allow-base-mismatch"


def check_expert_base(
    manifest: Manifest,
    identity: BaseIdentity,
    *,
    allow_mismatch: bool = False,
    shapes_agree: bool | None = None,
    widths: HiddenSizes = NO_HIDDEN_SIZES,
) -> list[str]:
    """Check an expert against a base; return the warnings that a result must carry.

    ``shapes_agree`` says whether every module of the adapter is in the base with its shape; None
    means unknown, and then they are taken to agree if the architecture is the same.

    Raises:
        BaseMismatchError: when they do not fit and a mismatch is not allowed.
    """
    required = manifest.base
    problems = _find_mismatches(required, identity)
    if problems and not allow_mismatch:
        could_work = required.arch == str(identity.arch) if shapes_agree is None else shapes_agree
        raise BaseMismatchError(
            f"{manifest.ref} {describe_mismatch(required, identity, widths)}",
            hint=f"{build_add_base_hint(required)}{', or ' + _ACCEPT_HINT if could_work else ''}",
        )
    if problems:
        return [f"{manifest.ref}: base mismatch allowed: {problem}" for problem in problems]
    return _warn_unchecked(manifest) + _warn_accepted(manifest, identity)


def describe_mismatch(
    required: BaseRequirement, identity: BaseIdentity, widths: HiddenSizes = NO_HIDDEN_SIZES
) -> str:
    """Return how a base differs from the required one, in one line; empty if it fits.

    If the architecture differs, nothing else is mentioned, as everything else differs then, too.
    """
    problems = _find_mismatches(required, identity)
    if not problems:
        return ""
    made_for = format_base_label(required.name, required.revision)
    here = format_base_label(identity.name, identity.revision)
    if required.arch != str(identity.arch):
        made, found = widths.get(required.arch), widths.get(str(identity.arch))
        if made and found and made != found:
            return f"was made for {made_for} (hidden size {made}; {here} has {found})"
        problems = problems[:1]
    return f"was made for {made_for}, not for {here}: {'; '.join(problems)}"


def build_add_base_hint(required: BaseRequirement) -> str:
    """Return the command that adds the required base, and where to download it if known."""
    name = required.name
    if "/" not in name or not is_hub_name(name):
        label = format_base_label(name, required.revision)
        return f"add the base {label} with `expertctl base add DIR`"
    revision = f"@{required.revision}" if required.revision else ""
    return f"`expertctl pull {shlex.quote(name + revision)}`"


def check_tensors(
    spec: AdapterSpec, shapes: Mapping[str, tuple[int, int]], *, base: str = "the base"
) -> list[str]:
    """Return every way in which an adapter does not fit a base with linear layers (out, in)."""
    made, found = _infer_adapter_width(spec), infer_hidden_size(shapes)
    if made is not None and found is not None and made != found:
        return [f"made for hidden size {made}; {base} has {found}"]
    misfits = (_describe_misfit(part, shapes) for part in spec.parts)
    return truncate_problems([misfit for misfit in misfits if misfit is not None])


def _infer_adapter_width(spec: AdapterSpec) -> int | None:
    """Return the hidden size that all parts of an adapter agree on; ``None`` if unknown."""
    pairs = {
        part.module: (part.outputs, part.inputs)
        for part in spec.parts
        if isinstance(part, Lora | Dora) and not (isinstance(part, Lora) and part.stacked)
    }
    return infer_hidden_size(pairs)


def infer_hidden_size(shapes: Mapping[str, tuple[int, int]]) -> int | None:
    """Infer the hidden size from the (out, in) of layers; ``None`` if they disagree."""
    widths = set()
    for module, (outputs, inputs) in shapes.items():
        name = module.rpartition(".")[2]
        widths |= {inputs} if name in _INPUT_PROJECTIONS else set()
        widths |= {outputs} if name in _OUTPUT_PROJECTIONS else set()
    return widths.pop() if len(widths) == 1 else None


def _describe_misfit(part: Part, shapes: Mapping[str, tuple[int, int]]) -> str | None:
    if isinstance(part, SoftPrompt):
        return _describe_prompt_misfit(part, shapes)
    shape = shapes.get(find_base_name(part.module, shapes))
    if shape is None:
        return f"{part.module}: {explain_absent_module(part.module, shapes)}"
    if (
        isinstance(part, Lora)
        and part.module_after_stack
        and find_base_name(part.module_after_stack, shapes) in shapes
    ):
        return f"{part.module}: the last one it was made for, but the base has more experts"
    match part:
        case Lora() | Dora():
            made, found = f"{part.outputs} x {part.inputs}", f"{shape[0]} x {shape[1]}"
        case Ia3(on_input=on_input, size=size):
            side = "inputs" if on_input else "outputs"
            made, found = f"{size} {side}", f"{shape[1 if on_input else 0]} {side}"
    if made == found or (isinstance(part, Lora) and _fits_columns(part, shape)):
        return None
    return f"{part.module}: made for {made}, the base has {found}"


def _fits_columns(part: Lora, shape: tuple[int, int]) -> bool:
    """Tell whether a stack fits a base that has its experts as columns, where nothing is swapped.

    Which bases do is checked when an expert is loaded for one.
    """
    if part.stacked is None or not part.stacked.transposed:
        return False
    matrices = 2 if part.module.endswith(("gate_proj", "up_proj")) else 1
    return (part.outputs * matrices, part.inputs) == (shape[1], shape[0] * matrices)


def _describe_prompt_misfit(part: SoftPrompt, shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """Compare the width of virtual tokens with that of the base's tokens, the input of its head."""
    width = next((shapes[name][1] for name in HEAD_NAMES if name in shapes), None)
    if part.width == width:
        return None
    tokens = f"are {width}" if width else "have no width that is known"
    return f"{part.embeddings}: {part.width} wide, the base's tokens {tokens}"


def _find_mismatches(required: BaseRequirement, identity: BaseIdentity) -> list[str]:
    problems = []
    if required.arch != str(identity.arch):
        problems.append("the architecture differs")
    problems += _find_tokenizer_mismatches(required, identity)
    if required.weights is not None:
        accepted = {required.weights, *required.accepts}
        if str(identity.weights) not in accepted:
            problems.append("the weights differ")
    elif required.name != identity.name:
        problems.append("the name differs, and the package states no digest of the weights")
    elif required.revision != identity.revision:
        problems.append("the revision differs, and the package states no digest of the weights")
    return problems


def _find_tokenizer_mismatches(required: BaseRequirement, identity: BaseIdentity) -> list[str]:
    found = identity.tokenizer_for_version(required.tokenizer_version)
    if found is None:
        return ["the tokenizer.json of the base changed since it was added, so it was not compared"]
    if str(found) == required.tokenizer:
        return []
    if required.tokenizer_version > 1:
        return ["the tokenizer differs"]
    return [
        "the tokenizer differs, or was saved again: the package states a digest of the file "
        "(version 1), which cannot tell"
    ]


def _warn_unchecked(manifest: Manifest) -> list[str]:
    if manifest.base.weights is not None:
        return []
    return [
        f"{manifest.ref}: the content of the base was not checked: the package states no digest "
        f"of its weights"
    ]


def _warn_accepted(manifest: Manifest, identity: BaseIdentity) -> list[str]:
    """Say that a base has other weights, such as a quantised copy, that the manifest accepts."""
    required = manifest.base
    if required.weights is None or str(identity.weights) == required.weights:
        return []
    made_for = format_base_label(required.name, required.revision)
    here = format_base_label(identity.name, identity.revision)
    return [f"{manifest.ref}: was made for {made_for}; its manifest accepts the weights of {here}"]


def format_base_label(name: str, revision: str | None) -> str:
    """Return the display name of a base: its name and a short revision."""
    return f"{name}@{revision[:12]}" if revision else name
