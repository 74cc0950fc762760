"""An encoder that remembers, for experiments that meet the same texts again and again."""

from collections.abc import Sequence

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.encoded import Encoded
from expertctl.routing.encoder import Encoder
from expertctl.routing.vector_table import Vectors


class Memorised:
    """Encodes every text once."""

    def __init__(self, encoder: Encoder) -> None:
        """Wrap an encoder."""
        self.encoder = encoder
        self.name = encoder.name
        self.dimensions = encoder.dimensions
        self.deep_dimensions = encoder.deep_dimensions
        self.stamp = encoder.stamp
        self._digest = encoder.digest()
        self._known: dict[str, tuple[Vectors, Vectors]] = {}

    def digest(self) -> Digest:
        """Return that of the encoder."""
        return self._digest

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""
        return self.encode_deep(texts).rows

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Return rows and deep rows."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            encoded = self.encoder.encode_deep(new)
            self._known |= zip(new, zip(encoded.rows, encoded.deep, strict=True), strict=True)
        rows, deep = zip(*(self._known[text] for text in texts), strict=True)
        return Encoded(np.stack(rows), np.stack(deep))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map cosines as the encoder does."""
        return self.encoder.calibrate(cosines)
