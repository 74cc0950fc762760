"""Makes runs and gains to be remembered."""

from dataclasses import replace

from expertctl.digest import Digest
from expertctl.store.job import Job, UsedExpert
from expertctl.store.pair_gain import PairGain

X, Y = UsedExpert("acme/x@1.0.0", Digest.of(b"x")), UsedExpert("acme/y@1.0.0", Digest.of(b"y"))
NOW = 1_800_000_000.0
DAY = 86_400.0


def a_job(number: int, *experts: UsedExpert, alone: bool = False, **said: object) -> Job:
    """A run of X, or of other experts; the same number gives the same id."""
    plain = Job(
        job_id=Digest.of(str(number).encode()).hex[:32],
        at=NOW,
        task="default",
        base="base",
        experts=() if alone else experts or (X,),
        finish_reason="stop",
    )
    return replace(plain, **said)  # type: ignore[arg-type]  # fields of a job


def a_gain(**other: object) -> PairGain:
    """A gain of X and Y together that is sure."""
    plain = PairGain(
        first=X.content_digest,
        second=Y.content_digest,
        base="base",
        gain=0.2,
        low=0.1,
        high=0.3,
        p=0.001,
        n=100,
        at=1.0,
    )
    return replace(plain, **other)  # type: ignore[arg-type]  # fields of a gain
