"""Bytes that may be JSON lines: some that are, and whatever could be taken for the end of one."""

from hypothesis import strategies as st

_BETWEEN = (
    b"\n", b"\r", b"\r\n", b"\x0b", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b" ", b'"', b"\xff",
)  # fmt: skip


def any_bytes_amid(*lines: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes at all, or these lines with anything between them."""
    pieces = st.sampled_from((*lines, *_BETWEEN))
    return st.binary(max_size=200) | st.lists(pieces).map(b"".join)
