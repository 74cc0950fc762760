"""How soon the second question about a long document starts, against the first.

A base in the shape of Qwen3-0.6B with random weights in bfloat16, two workers, pages of float16, as
`run` has them. The first question reads the document; the second finds its keys and values in the
pool and reads only itself. What is timed is from the tokens to the scores of the last one, with
finding and copying pages.
"""

import math
from collections.abc import Sequence
from itertools import count

from benchmarks.engine_process import prompt_ids
from benchmarks.harness import Row, compare, main, timed
from benchmarks.inputs import base_config
from benchmarks.oracle import check_decoder
from expertctl.digest import Digest
from expertctl.engine.budget import Budget
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_loan import KVWanted
from expertctl.engine.kv_pool import KVPool
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.engine.random_base import random_base
from expertctl.engine.tiers import Tiers

DOCUMENT, QUESTION, ANSWER = 8192, 32, 64
"""Tokens of each; an answer has room, but is not written."""
SCHEME, WORKERS, MEMORY = Scheme.BFLOAT16, 2, 8 << 30


class Reader:
    """Asks one question after the other about one document."""

    def __init__(self, crew: Crew) -> None:
        """Take a base with random weights."""
        config = base_config()
        budget = Budget(MEMORY)
        self._decoder = PackedDecoder(random_base(config, SCHEME), crew)
        self._pool = KVPool(Tiers(ram=budget, device=budget), numbers=Scheme.FLOAT16)
        self._document = prompt_ids(DOCUMENT, config.vocab_size)
        self._questions = count(1)

    def first(self) -> None:
        """Ask about a document that nobody has read."""
        self._pool.forget("reader")
        assert self._ask() == 0

    def next(self) -> None:
        """Ask something else about it."""
        assert self._ask() == DOCUMENT

    def _ask(self) -> int:
        """Read what is to be read; return how many tokens were read before."""
        config, number = self._decoder.config, next(self._questions)
        ids = [*self._document, *(number + 5 * place for place in range(QUESTION))]
        wanted = KVWanted(
            cache_key="reader",
            identity=Digest.of(b"the base alone"),
            config=config,
            ids=ids,
            virtual=0,
            capacity=len(ids) + ANSWER,
        )
        with self._pool.borrow(wanted) as loan:
            scores = self._decoder.prefill(ids[loan.reused :], loan.cache).logits
            assert math.isfinite(float(scores.sum())), "scores are no numbers"
            loan.complete(ids)
            return loan.reused


def measure(rounds: int) -> Sequence[Row]:
    """Ask a first and another question in turn."""
    crew = Crew(WORKERS)
    try:
        check_decoder(SCHEME, crew)
        reader = Reader(crew)
        reader.first()
        case = f"start of the next question about {DOCUMENT} tokens"
        ours, theirs = timed(reader.next), timed(reader.first)
        return [compare(case, ours, theirs, rival="the first", rounds=rounds, target="<= 0.1")]
    finally:
        crew.close()


if __name__ == "__main__":
    main("prefix", measure, rounds=3)
