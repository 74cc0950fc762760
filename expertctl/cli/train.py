"""``expertctl train``: from examples to a measured package.

The examples and the options are checked before torch is imported. Ctrl-C ends training after the
current step; the same command continues.
"""

import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.completion import complete_bases, complete_own_keys
from expertctl.cli.engine import resolve_base
from expertctl.cli.evaluation import MetricOption, evaluate_plan, record_evaluation
from expertctl.cli.help import expand_flags
from expertctl.cli.output import JsonFlag, emit, note, print_message, warn
from expertctl.cli.package_view import build_built_document, format_built
from expertctl.cli.packages import (
    find_routing_warnings,
    load_private_key,
    print_build_notes,
    warn_missing_grant,
)
from expertctl.cli.process import CancellationFlag
from expertctl.cli.progress import StepBar, show_progress
from expertctl.errors import NotFoundError, UsageError, format_install_command
from expertctl.package.build import BuildPlan, build_package, plan_build
from expertctl.package.draft import DEFAULT_VERSION, ManifestOverrides
from expertctl.package.evaluation import read_evaluation_data
from expertctl.package.write import check_target
from expertctl.reference import PackageName, Version
from expertctl.settings import load_settings
from expertctl.store.bases import BaseStore

if TYPE_CHECKING:
    from expertctl.engine.evaluation_result import EvaluationResult
    from expertctl.package.evaluation import Metric
    from expertctl.train.options import TrainingOptions
    from expertctl.train.session import TrainedAdapter, TrainingRequest
    from expertctl.train.trainer import TrainingProgress

_LIBRARIES = ("torch", "transformers", "peft")
_RESULT = "Package"


@dataclass(frozen=True, slots=True)
class TrainFlags:
    """What to train, and for how long."""

    kind: Annotated[
        Literal["lora", "dora", "ia3", "prompt"], typer.Option(help="The kind of adapter.")
    ] = "lora"
    rank: Annotated[
        int | None, typer.Option(min=1, max=256, help="Rank of lora and dora; default 8.")
    ] = None
    virtual_tokens: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Virtual tokens of prompt; default 16.")
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, max=100_000, help="Train for at most this long; else all epochs."),
    ] = None
    epochs: Annotated[
        int, typer.Option(min=1, max=1000, help="Passes over the examples, at most.")
    ] = 3
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="Exactly so many steps, as an earlier run had."),
    ] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1.0, help="Highest learning rate; default by kind."),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Examples of a step.")] = 8
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of order and first values.")] = 0
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where to train.", show_default="cuda where there is one"),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Start anew instead of continuing.")
    ] = False

    def resolve(self) -> "TrainingOptions":
        """Return the options with their defaults.

        Raises:
            UsageError: for an option of another kind of adapter.
        """
        from expertctl.train.options import LEARNING_RATES, TrainingOptions

        if self.rank is not None and self.kind not in {"lora", "dora"}:
            raise UsageError(f"{self.kind} has no rank", hint="leave out --rank")
        if self.virtual_tokens is not None and self.kind != "prompt":
            raise UsageError(f"{self.kind} has no virtual tokens", hint="add --kind prompt")
        if self.steps is not None and self.minutes is not None:
            raise UsageError("--steps and --minutes exclude each other", hint="leave out one")
        defaults = TrainingOptions()
        return TrainingOptions(
            kind=self.kind,
            rank=self.rank or defaults.rank,
            virtual_tokens=self.virtual_tokens or defaults.virtual_tokens,
            learning_rate=self.learning_rate or LEARNING_RATES[self.kind],
            epochs=self.epochs,
            minutes=self.minutes,
            steps=self.steps,
            batch_size=self.batch_size,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class TrainedPackageFlags:
    """The package, and how its expert is measured."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Default: NAME-VERSION.expert here.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    sign: Annotated[
        str | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            autocompletion=complete_own_keys,
            help="Sign with one of your keys.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NS/NAME",
            help="The package's name; default local/DATA.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    version: Annotated[
        str, typer.Option(metavar="X.Y.Z", help="Its version.", rich_help_panel=_RESULT)
    ] = DEFAULT_VERSION
    description: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the expert does.", rich_help_panel=_RESULT),
    ] = None
    license_: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="SPDX",
            help="Its licence, such as Apache-2.0.",
            rich_help_panel=_RESULT,
        ),
    ] = None
    metric: MetricOption = "exact_match"
    evaluate: Annotated[
        bool,
        typer.Option(
            "--eval/--no-eval", help="Measure it on the test prompts.", rich_help_panel=_RESULT
        ),
    ] = True

    def parse(self, data: Path) -> ManifestOverrides:
        """Return the values of the manifest; the name defaults to that of the data."""
        from expertctl.package.draft import build_default_name

        name = self.name or build_default_name(Path(data.stem))
        return ManifestOverrides(
            str(PackageName.parse(name)),
            str(Version.parse(self.version)),
            self.description,
            self.license_,
        )


@expand_flags
def train(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help='JSON Lines: {"prompt": "3 + 4", "answer": "7"}, or messages.'
        ),
    ],
    *,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            autocompletion=complete_bases,
            help="The base to train for: one you added, a folder or GGUF file, or a hub's name.",
        ),
    ] = None,
    options: TrainFlags,
    package: TrainedPackageFlags,
    as_json: JsonFlag = False,
) -> None:
    """Train an adapter on examples, measure it, and package it. After Ctrl-C, repeat the command.

    Example: expertctl train orders.jsonl --base Qwen/Qwen3-0.6B --minutes 30 --sign me
    """
    if base is None:
        hint = "`expertctl base list` shows those that you have"
        raise UsageError("--base is missing: which model the adapter is for", hint=hint)
    settings = load_settings()
    overrides = package.parse(data)
    target = package.output or _name_package(overrides)
    check_target(target)
    key = load_private_key(settings, package.sign) if package.sign else None
    bases = BaseStore(settings.home.bases)
    request = _make_request(data, base, options, package.metric, overrides, target, as_json=as_json)
    trained = _train(bases, request, as_json=as_json)
    plan, found = _measure(trained, package, target, as_json=as_json)
    with show_progress("packing", 2 * plan.size, as_json=as_json) as report:
        built = build_package(plan, target, key=key, progress=report)
    print_build_notes(built)
    doubts = find_routing_warnings(settings, plan)
    for line in doubts:
        print_message(line)
    if package.sign:
        warn_missing_grant(settings, package.sign, built.manifest.package)
    if found is not None and found.expert.right_count <= found.base.right_count:
        warn(["the expert is no better than the base on the test prompts"])
    document = {
        **build_built_document(built),
        "warnings": [*trained.warnings, *built.warnings, *doubts],
        "training": build_training_document(trained),
        "evaluation": [asdict(entry) for entry in plan.manifest.evaluation],
    }
    emit(document, format_built(built), as_json=as_json)


def _name_package(overrides: ManifestOverrides) -> Path:
    assert overrides.name is not None
    return Path(f"{PackageName.parse(overrides.name).name}-{overrides.version}.expert")


def _make_request(
    data: Path,
    base: str,
    options: TrainFlags,
    metric: "Metric",
    overrides: ManifestOverrides,
    target: Path,
    *,
    as_json: bool,
) -> "TrainingRequest":
    """Read the examples and find the base; torch is imported last."""
    from expertctl.train.data import check_answers, read_training_data

    settings, chosen = load_settings(), options.resolve()
    examples = read_training_data(data)
    check_answers(examples, metric)
    _require_libraries()
    resolved = resolve_base(base, settings, as_json=as_json)
    assert resolved is not None
    with show_progress("loading", None, as_json=as_json):
        from expertctl.train.draft import TrainingFolder
        from expertctl.train.session import TrainingRequest

    return TrainingRequest(
        data=examples,
        base=BaseStore(settings.home.bases).find(resolved),
        options=chosen,
        folder=TrainingFolder.for_package(target),
        overrides=overrides,
        device=options.device,
        restart=options.restart,
    )


def build_training_document(trained: "TrainedAdapter") -> dict[str, object]:
    """Return what ``train --json`` says of the training."""
    record, request = trained.record, trained.request
    return {
        **trained.training,
        "seconds": round(record.seconds, 1),
        "tokens_per_second": round(record.tokens / record.seconds, 1) if record.seconds else None,
        "held_out_losses": [{"step": step, "loss": loss} for step, loss in record.losses],
        "folder": str(request.folder.path),
    }


def _require_libraries() -> None:
    """Require what trains.

    Raises:
        NotFoundError: when a library is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise NotFoundError(
            f"training needs {' and '.join(missing)}, which {_are(missing)} not installed",
            hint=format_install_command("train"),
        )


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _train(bases: BaseStore, request: "TrainingRequest", *, as_json: bool) -> "TrainedAdapter":
    from expertctl.train.session import train_adapter
    from expertctl.train.trainer import TrainingStoppedError

    encoding = StepBar("encoding examples", as_json=as_json)
    bar, flag = StepBar("training", as_json=as_json), CancellationFlag()

    def report_encoding(done: int, total: int) -> None:
        encoding(done, total, "")
        if done == total:
            encoding.close()

    def report(progress: "TrainingProgress") -> None:
        text = f"loss {progress.loss:.3f}, held out {progress.held_out:.3f}"
        bar(progress.step, progress.steps, text)

    signals = [signal.SIGINT, signal.SIGTERM]
    try:
        with flag.catch_signals(*signals):
            return train_adapter(
                bases,
                request,
                report=report,
                report_encoding=report_encoding,
                is_stopped=flag,
                notify=note,
                warn=lambda text: warn([text]),
            )
    except TrainingStoppedError as stopped:
        encoding.close()
        bar.close()
        note(f"training continues from {request.folder.path} with the same command")
        raise KeyboardInterrupt from stopped
    finally:
        encoding.close()
        bar.close()


def _measure(
    trained: "TrainedAdapter", package: TrainedPackageFlags, target: Path, *, as_json: bool
) -> "tuple[BuildPlan, EvaluationResult | None]":
    """Plan the package; with an evaluation, its result and what failed are in the manifest."""
    request = trained.request
    folder, facts = request.folder, request.facts
    plan = plan_build(folder.adapter, request.overrides, base=facts)
    if not package.evaluate or not trained.test_prompts:
        if package.evaluate:
            warn(["no test example is one prompt and one answer, so no answers were measured"])
        return plan, None
    data = read_evaluation_data(folder.test, metric=package.metric)
    task = request.data.path.stem
    found = evaluate_plan(plan, data, task=task, output=target, as_json=as_json)
    trained.write_manifest(found)
    plan = plan_build(folder.adapter, request.overrides, base=facts)
    return record_evaluation(plan, found, task=task), found
