"""The picture of a server under more and more load (extra ``plot``)."""

from pathlib import Path

from benchmarks.served.saturation import Saturation


def draw(found: Saturation, path: Path, *, tokens: int, what: str) -> None:
    """Draw throughput and times to the first token against the rate that is offered.

    ``tokens`` are those of an answer, ``what`` is the title: the server and its clients.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7))
    rates = [point.offered for point in found.points]
    written = [point.tokens for point in found.points]
    above.plot([0, *rates], [0, *(tokens * rate for rate in rates)], ":", c="grey", label="offered")
    above.plot(rates, written, "o-", label="written")
    above.set_ylabel("throughput (tokens/s)")
    above.set_ylim(0, 1.5 * max(written))
    below.plot(rates, [point.p50 for point in found.points], "o-", label="p50")
    below.plot(rates, [point.p99 for point in found.points], "s-", label="p99")
    below.set_ylabel("time to first token (s)")
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter("{x:g}")
    below.set_xlabel("offered load (requests/s)")
    below.set_xlim(left=0)
    for axes in (above, below):
        axes.axvline(found.rate, ls="--", c="tab:red", label=f"saturation, {found.rate:.2f}/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(loc="upper left")
    figure.suptitle(what)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
