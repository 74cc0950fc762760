"""Where pieces of a copy lie, by its description, where each block is as long as in memory."""

from expertctl.store.copy_file import ALIGNED, CopyShape

ENTRY_BYTES = 8 + 32
"""Of the table: how many bytes a piece has, and their sha256."""
END_BYTES = 3 * 8 + 32


def in_file(shape: CopyShape, piece: int) -> int:
    """Return where a piece begins."""
    place = shape.in_memory(piece)
    if piece < shape.rest_pieces:
        return place.start
    return _filled(shape.rest) + (piece - shape.rest_pieces) * _filled(shape.block)


def table(shape: CopyShape) -> int:
    """Return where the table begins."""
    return _filled(shape.rest) + shape.blocks * _filled(shape.block) if shape.blocks else shape.rest


def file_bytes(shape: CopyShape) -> int:
    """Return how long the file is."""
    return table(shape) + shape.pieces * ENTRY_BYTES + END_BYTES


def _filled(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
