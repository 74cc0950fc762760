"""What each format keeps of a base, and in how many bytes: our formats beside llama.cpp's.

A format of ours is compared with the one of llama.cpp that has about as many bytes. `build_figure`
plots all of them.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engines import LLAMA_INSTALL, has_llama
from benchmarks.harness import Row, Seconds, compare_rates, judge
from benchmarks.trained.decode_speed import TASK
from benchmarks.trained.divergence import Divergence, Numbers, PackedScorer, measure_divergence
from benchmarks.trained.llama_formats import LLAMA_FORMATS, LlamaBase, quantise
from benchmarks.trained.merged_base import write_float_gguf
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import read_model_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LLAMA = "ours", "llama.cpp"
SCHEMES = {
    "float32": Scheme.FLOAT32,
    "bf16": Scheme.BFLOAT16,
    "int8": Scheme.INT8,
    "int4": Scheme.INT5,
    "int4, 4 bits": Scheme.INT4,
}
"""Our formats: bases of this size have five bits in int4, larger ones four."""
RIVALS = {"int8": "Q8_0", "int4": "Q4_K_M", "int4, 4 bits": "Q4_0"}
DIVERGENCE_TARGET, BYTES_TARGET, SPEED_TARGET = "<= 1", "<= 1.03", ">= 1.5"
JUDGED = ("int8", "int4")
"""Our formats that have targets."""
DEFAULT_FOLDER = Path("~/.cache/expertctl-benchmarks/quality")
_DIVERGENCES = "divergences.json"
"""The file with the mean divergences of all formats of each base, beside the bases."""
_LEAST_SHOWN = 1e-6
"""Divergence of formats that are plotted: float32 has less."""
_COLOURS, _MARKS = {OURS: "#2a6fb0", LLAMA: "#d9822b"}, {OURS: "o", LLAMA: "s"}


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """One format of one base; ``rates`` are tokens per second by the number of threads."""

    base: str
    family: str
    name: str
    nbytes: int
    weights: int
    divergence: Divergence
    rates: Mapping[int, float] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Bits per weight of the matrices."""
        return self.nbytes * 8 / self.weights

    def describe(self) -> str:
        """Describe it in a line."""
        found = self.divergence
        return (
            f"{self.name}: {self.bits:.2f} bits, KL {found.mean:.5f}, median {found.median:.5f}, "
            f"99th percentile {found.high:.4f}, top-1 {found.top:.4f}, "
            f"perplexity {found.perplexity:.3f}"
        )


def measure_formats(
    name: str, directory: Path, chunks: Sequence[list[int]], reference: Sequence[Numbers]
) -> Iterator[FormatQuality]:
    """Yield our formats of a base, then those of llama.cpp if it is installed."""
    shapes = read_model_config(directory).tensor_shapes().values()
    weights = sum(shape[0] * shape[1] for shape in shapes if len(shape) > 1)
    for ours, scheme in SCHEMES.items():
        with closing(PackedScorer(directory, scheme)) as scorer:
            found = measure_divergence(chunks, reference, scorer.score)
            yield FormatQuality(name, OURS, ours, scorer.nbytes, weights, found)
    for theirs in LLAMA_FORMATS if has_llama() else ():
        with LlamaBase(quantise(write_float_gguf(directory), theirs)) as llama:
            found = measure_divergence(chunks, reference, llama.score)
            yield FormatQuality(name, LLAMA, theirs, llama.nbytes, weights, found)


def write_divergences(folder: Path, formats: Sequence[FormatQuality]) -> None:
    """Keep the mean divergences of all formats, for the rows of other benchmarks."""
    found: dict[str, dict[str, float]] = {}
    for each in formats:
        found.setdefault(each.name, {})[each.base] = each.divergence.mean
    (folder / _DIVERGENCES).write_text(json.dumps(found), encoding="utf-8")


def describe_divergences(ours: str, theirs: str, *, folder: Path = DEFAULT_FOLDER) -> str:
    """Say what two formats lose on trained bases, as `write_divergences` kept it."""
    try:
        text = (folder.expanduser() / _DIVERGENCES).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "KL of both sides: python -m benchmarks quality, run before"
    found = json.loads(text)
    parts = (
        f"{name} {', '.join(f'{value:.4f}' for value in found[name].values())}"
        for name in (ours, theirs)
        if name in found
    )
    return f"KL from float32 on trained bases (nats): {'; '.join(parts)}"


def make_format_rows(formats: Sequence[FormatQuality]) -> Iterator[Row]:
    """Yield the rows of one base: divergence and bytes of each of our formats and its rival."""
    theirs = {each.name: each for each in formats if each.family == LLAMA}
    for ours in (each for each in formats if each.family == OURS):
        rival = theirs.pop(RIVALS.get(ours.name, ""), None)
        yield from _make_lone_row(ours) if rival is None else _compare_formats(ours, rival)
    for other in theirs.values():
        case = f"base {other.base}: KL, {other.name}"
        row = make_ratio_row(case, None, other.divergence.mean, rival=other.name, unit="nats")
        yield replace(row, note=other.describe())


def _make_lone_row(ours: FormatQuality) -> Iterator[Row]:
    case, rival = f"base {ours.base}: KL, {ours.name}", RIVALS.get(ours.name)
    row = make_ratio_row(case, ours.divergence.mean, None, rival=rival or "float32", unit="nats")
    missing = f"; {rival}: {LLAMA_INSTALL}" if rival else ""
    yield replace(row, note=ours.describe() + missing)


def _compare_formats(ours: FormatQuality, theirs: FormatQuality) -> Iterator[Row]:
    far = make_ratio_row(
        f"base {ours.base}: KL, {ours.name}", ours.divergence.mean, theirs.divergence.mean,
        rival=theirs.name, unit="nats",
    )  # fmt: skip
    far = replace(far, note=f"{ours.describe()}; {theirs.describe()}")
    size = make_ratio_row(
        f"base {ours.base}: bytes, {ours.name}", ours.nbytes / 1e6, theirs.nbytes / 1e6,
        rival=theirs.name, unit="MB",
    )  # fmt: skip
    judged = ours.name in JUDGED
    yield judge(far, DIVERGENCE_TARGET) if judged else far
    yield judge(size, BYTES_TARGET) if judged else size


def make_ratio_row(
    case: str,
    ours: float | None,
    theirs: float | None,
    *,
    rival: str,
    unit: str,
    better: str = "lower",
) -> Row:
    """Return a row of two figures, either of which may not have been measured."""
    known = ours is not None and theirs is not None and theirs > 0
    ratio = round(ours / theirs, 4) if known and ours is not None and theirs else None
    figures = [None if each is None else round(each, 6) for each in (ours, theirs)]
    return Row(case, figures[0], rival, figures[1], unit, better, ratio, None)


def make_speed_rows(
    name: str, seconds: Mapping[int, Mapping[str, Sequence[Seconds]]]
) -> Iterator[Row]:
    """Yield the rows of decoding, from the seconds of each format by the number of threads."""
    work = (float(TASK.tokens), float(TASK.tokens))
    for threads, found in seconds.items():
        for ours, theirs in RIVALS.items():
            target = SPEED_TARGET if ours in JUDGED else None
            yield compare_rates(
                f"base {name}: decode, {ours}, threads: {threads}", found[ours], found[theirs],
                work=work, rival=theirs, unit="tok/s", target=target,
            )  # fmt: skip


def add_rates(
    formats: Sequence[FormatQuality], seconds: Mapping[int, Mapping[str, Sequence[Seconds]]]
) -> tuple[FormatQuality, ...]:
    """Return formats with the tokens per second of each."""
    return tuple(
        replace(
            each,
            rates={
                threads: TASK.tokens / statistics.median(found[each.name])
                for threads, found in seconds.items()
            },
        )
        for each in formats
    )


def build_figure(formats: Sequence[FormatQuality]) -> "Figure":
    """Return the plot: divergence over bits per weight, and speed over divergence if measured."""
    from matplotlib.figure import Figure

    threads = max((count for each in formats for count in each.rates), default=None)
    figure = Figure(figsize=(5.5 if threads is None else 11.0, 4.6), layout="constrained")
    panels = figure.subplots(1, 1 if threads is None else 2, squeeze=False)[0]
    shown = [each for each in formats if each.divergence.mean > _LEAST_SHOWN]
    for each in shown:
        style = {"color": _COLOURS[each.family], "marker": _MARKS[each.family], "linestyle": ""}
        points = [(each.bits, each.divergence.mean)]
        points += [] if threads is None else [(each.divergence.mean, each.rates[threads])]
        label = each.name if each.base == shown[0].base else ""
        place: tuple[float, float] = (6, 4) if each.family == LLAMA else (-6, -10)
        for axes, point in zip(panels, points, strict=True):
            axes.plot(*point, **style, alpha=0.7)
            axes.annotate(
                label, point, xytext=place, textcoords="offset points", fontsize=7,
                ha="left" if each.family == LLAMA else "right", parse_math=False,
            )  # fmt: skip
    panels[0].margins(0.15)
    panels[0].set(xlabel="bits per weight", ylabel="mean KL from float32, nats", yscale="log")
    if threads is not None:
        rate = f"tokens per second, threads: {threads}"
        panels[1].set(xlabel="mean KL from float32, nats", ylabel=rate, xscale="log")
    figure.suptitle(f"{OURS}: circles, {LLAMA}: squares; names at the first base", fontsize=10)
    return figure
