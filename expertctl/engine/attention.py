"""Attention of new tokens to themselves and to what the cache holds, causal and windowed.

A window of W lets a token see W tokens, itself included. What a step may see is worked out once per
kind of layer (`view_of`), not once per layer.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Which keys a step looks at: those from ``first`` on, and of them what ``mask`` allows."""

    first: int
    mask: Tensor | None  # bool [tokens, keys], None: all, or what is causal
    causal: bool


def view_of(
    start: int, tokens: int, window: int | None, *, device: torch.device | str = "cpu"
) -> View:
    """Return what ``tokens`` new tokens see when ``start`` stand before them."""
    first = 0 if window is None else max(0, start + 1 - window)
    if tokens == 1:
        return View(first, None, causal=False)
    keys = torch.arange(first, start + tokens, device=device)
    queries = torch.arange(start, start + tokens, device=device)[:, None]
    if window is not None and window < start + tokens:
        return View(first, (keys <= queries) & (keys > queries - window), causal=False)
    if start == 0:
        return View(0, None, causal=True)
    return View(first, keys <= queries, causal=False)


def attend(queries: Tensor, keys: Tensor, values: Tensor, view: View) -> Tensor:
    """Return [tokens, heads * dim] from queries [heads, tokens, dim], keys [kv_heads, length, dim].

    Several query heads share one key head; keys are not copied for that.
    """
    if queries.is_cuda:
        return attend_folded(queries, keys, values, view)
    out = F.scaled_dot_product_attention(
        queries.to(keys.dtype)[None],
        keys[None, :, view.first :],
        values[None, :, view.first :],
        attn_mask=view.mask,
        is_causal=view.causal,
        enable_gqa=queries.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1).flatten(1).to(queries.dtype)


def attend_folded(queries: Tensor, keys: Tensor, values: Tensor, view: View) -> Tensor:
    """Return the same as `attend`, with the heads that share keys as more tokens of one head.

    No fused kernel of CUDA takes both a mask and shared heads; without one, torch would copy the
    keys for each head and keep all scores. In what order a kernel leaves heads and tokens in memory
    differs.
    """
    heads, tokens, width = queries.shape
    shares = heads // keys.shape[0]
    mask = view.mask
    if view.causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).tril()
    out = F.scaled_dot_product_attention(
        queries.to(keys.dtype).reshape(1, keys.shape[0], shares * tokens, width),
        keys[None, :, view.first :],
        values[None, :, view.first :],
        attn_mask=None if mask is None else mask.repeat(shares, 1),
    )
    split = out.view(-1, shares, tokens, width)  # by key head; a view whatever their order
    return split.permute(2, 0, 1, 3).flatten(1).to(queries.dtype)


def attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None) -> Tensor:
    """Return the same as `attend` by the textbook formula; the oracle of its tests."""
    groups, tokens, length = queries.shape[0] // keys.shape[0], queries.shape[1], keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=0) for x in (keys, values))
    scores = torch.matmul(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[2])
    for row, position in enumerate(range(length - tokens, length)):
        scores[:, row, position + 1 :] = -torch.inf
        if window is not None:
            scores[:, row, : max(0, position + 1 - window)] = -torch.inf
    out = scores.softmax(-1) @ values  # [heads, tokens, dim]
    return out.transpose(0, 1).flatten(1)
