"""Room for the texts of a server: one that begins in little memory says how long they may be."""

from bisect import bisect_left

from expertctl.engine.loaded_base import OpenBase
from expertctl.engine.moe.cache_plan import USUAL_TOKENS


def told_of_room(base: OpenBase, *, limit: int, rows: int) -> str | None:
    """Return what an operator should know of the length of texts; None where usual ones fit.

    ``limit`` are the bytes of all that a server holds, ``rows`` the texts of a batch. A text with
    experts takes more than one without. A server reads two tokens before it begins, so those fit.
    """
    usual = min(USUAL_TOKENS, base.context)

    def is_too_long(tokens: int) -> bool:
        beside = base.kv_bytes(tokens) + base.buffer_bytes(tokens, rows=rows)
        return base.weight_bytes + beside > limit

    if not is_too_long(usual):
        return None
    longest = bisect_left(range(1, usual), True, key=is_too_long)
    return (
        f"there is room for texts up to {longest} tokens, prompt and answer together; raise the "
        "memory budget for longer ones"
    )
