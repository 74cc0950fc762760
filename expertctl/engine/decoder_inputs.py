"""What any decoder checks before it reads: tokens, a plan's deltas, a soft prompt."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from expertctl.errors import IncompatibleError, UsageError


def checked_tokens(
    ids: Sequence[int] | Tensor, vocabulary: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return tokens as int64.

    Raises:
        UsageError: when there are none.
        IncompatibleError: for a token that the base does not have.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long, device=device)
    if len(tokens) == 0:
        raise UsageError("there is no token to read", hint="give a prompt that is not empty")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise IncompatibleError(
            f"token {low if low < 0 else high} is not among the {vocabulary} of the base",
            hint="the tokenizer belongs to another base",
        )
    return tokens


def check_modules(changed: Collection[str], modules: frozenset[str]) -> None:
    """Check that a plan changes only layers that the base has.

    Raises:
        IncompatibleError: when it does not.
    """
    strange = [name for name in changed if name not in modules]
    if strange:
        raise IncompatibleError(
            f"the base has no linear layer {_few(strange)}",
            hint="the expert was made for another base",
        )


def check_soft_prompt(soft_prompt: Tensor, hidden_size: int, *, length: int) -> None:
    """Check that virtual tokens [tokens, hidden] fit and stand before everything else.

    Raises:
        IncompatibleError: when they are of another width.
    """
    assert length == 0, "a soft prompt stands before the first token"
    if soft_prompt.shape[1] != hidden_size:
        raise IncompatibleError(
            f"a soft prompt is {soft_prompt.shape[1]} wide, tokens of the base are {hidden_size}",
            hint="the expert was made for another base",
        )


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
