"""Write down which experts tokens ask for: `python -m examples.moe.trace BASE --out trace.npy`.

Held-out documents, one after the other, are read by the decoder that runs use, with all experts in
memory. The file holds int16 [tokens, layers, used], the first choice of a token first. With
``--foreseen`` another one holds what the layer before foresaw; of the first layer it says nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.moe.text import LENGTH, Document, held_out_documents
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.routed_experts import ResidentExperts, RoutingChoices
from expertctl.package.model_config import read_model_config

Trace = np.ndarray[Any, np.dtype[np.int16]]


class NotedExperts(ResidentExperts):
    """All experts in memory, with a note of those asked for and those foreseen in each pass."""

    is_whole = False
    """Else no layer would foresee the next one's experts."""
    noted: list[tuple[Trace, Trace]]
    """Both [tokens, layers, used], of each pass."""

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Note what was chosen in all layers of a pass."""
        selected, likely = (
            ids[:, :tokens].swapaxes(0, 1).astype(np.int16)
            for ids in (choices.selected, choices.likely)
        )
        self.noted.append((selected, likely))


def traces(
    directory: Path, documents: Sequence[Document], *, threads: int = 1
) -> tuple[Trace, Trace]:
    """Return the experts that tokens of documents ask for in a base, and those that were foreseen.

    Both are [tokens, layers, used].
    """
    config = read_model_config(directory)
    assert config.experts is not None, "a base with routed experts"
    base = load_packed_base(directory, config, Scheme.FLOAT32)
    experts = NotedExperts(
        make_expert_shape(config, base.scheme), base.experts, config.experts.layers
    )
    experts.noted = []
    crew = ThreadPool(threads)
    decoder = PackedDecoder(base, crew, experts=experts)
    for document in documents:
        cache = PagedKVCache(config, LENGTH)
        for token in document.ids:  # one by one: a prompt asks the last layer for its end alone
            decoder.decode(token, cache)
    crew.close()
    chosen, foreseen = zip(*experts.noted, strict=True)
    guesses = np.concatenate(foreseen)
    guesses[:, 0] = np.arange(guesses.shape[-1])  # no guesses: distinct ids, as in any trace
    return np.concatenate(chosen), guesses


def main() -> None:
    """Write the traces of a base."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="folder of the base")
    parser.add_argument("--out", type=Path, required=True, help="the trace, .npy")
    parser.add_argument("--foreseen", type=Path, help="what layers foresaw, .npy")
    parser.add_argument("--documents", type=int, default=32, help="texts of 512 tokens")
    options = parser.parse_args()
    chosen, foreseen = traces(options.base, held_out_documents(options.documents, seed=2))
    np.save(options.out, chosen)
    if options.foreseen is not None:
        np.save(options.foreseen, foreseen)


if __name__ == "__main__":
    main()
