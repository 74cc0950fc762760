"""What an index finds for a prompt, by content digest."""

from expertctl.digest import Digest
from expertctl.routing.index import RoutingIndex
from expertctl.routing.vector_table import Vectors


def vector_of(index: RoutingIndex, prompt: str) -> Vectors:
    """The unit vector of a prompt."""
    row: Vectors = index.encoded(prompt).rows[0]
    return row


def found_for(index: RoutingIndex, prompt: str) -> dict[Digest, tuple[float, int]]:
    """The cosine of every expert that is found, and which of its texts is the closest."""
    found = index.search(vector_of(index, prompt))
    told = zip(found.experts.tolist(), found.cosines.tolist(), found.texts.tolist(), strict=True)
    return {index.digest(at): (cosine, text) for at, cosine, text in told}
