"""One training from a base and examples to an adapter directory with its manifest.

Everything that can be refused is refused before the first step: the adapter with its first values
is checked as `build` checks it. Ctrl-C writes a checkpoint, and the same call continues from there.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from expertctl.engine.evaluation_result import EvaluationResult
from expertctl.errors import CountProgress, DiskFullError, Notify, UsageError, ignore_count
from expertctl.files import hold_lock, make_folders, remove_tree
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import format_size
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.disk import disk_errors
from expertctl.train.base import (
    TrainingBase,
    choose_device,
    choose_training_dtype,
    open_training_base,
    use_exact_order,
)
from expertctl.train.batches import EncodedData, encode_data
from expertctl.train.checkpoint import TrainingRecord
from expertctl.train.data import TrainingData
from expertctl.train.draft import (
    TrainingFolder,
    find_library_versions,
    write_test_data,
    write_training_manifest,
)
from expertctl.train.model import add_adapter, list_trained, write_adapter
from expertctl.train.options import Settings, TrainingOptions
from expertctl.train.trainer import Report, Trainer, TrainingStoppedError

_SAVED_COPIES = 12
"""Files of the size of the adapter that are written: two checkpoints of four, and packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What to train, where, and how."""

    data: TrainingData
    base: StoredBase
    options: TrainingOptions
    folder: TrainingFolder
    overrides: ManifestOverrides
    device: str | None = None
    restart: bool = False
    """Whether a checkpoint in the folder is removed first."""

    @property
    def facts(self) -> BaseFacts:
        """What the adapter is checked against."""
        base = self.base
        return BaseFacts(base.identity, base.shapes, base.foreign, base.path)


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """An adapter directory with its manifest."""

    request: TrainingRequest
    record: TrainingRecord
    longest_answer: int
    training: JsonObject
    """What the manifest says of the training."""
    test_prompts: int
    """How many prompts the test file has."""
    warnings: tuple[str, ...] = ()
    """About the examples."""

    def write_manifest(self, result: EvaluationResult | None = None) -> None:
        """Write ``expert.json``; raises as `write_training_manifest`."""
        write_training_manifest(
            self.request.folder,
            self.request.overrides,
            self.request.data,
            base=self.request.facts,
            longest_answer=self.longest_answer,
            training=self.training,
            result=result,
        )


def train_adapter(
    bases: BaseStore,
    request: TrainingRequest,
    *,
    report: Report,
    report_encoding: CountProgress = ignore_count,
    is_stopped: Callable[[], bool],
    notify: Notify,
    warn: Notify,
) -> TrainedAdapter:
    """Train an adapter, or continue.

    ``report_encoding`` gets how many of all examples are encoded, ``report`` is called after every
    step. ``warn`` gets warnings about the examples.

    Raises:
        TrainingStoppedError: when ``is_stopped`` said so; the same call continues.
        ConflictError: when the folder has a training with other settings.
        ExpertError: for a base or examples that cannot be used, or a full disk.
    """
    device = choose_device(request.device)
    with _open_folder(request), use_exact_order(device):
        base = open_training_base(
            bases, request.base, dtype=choose_training_dtype(device), device=device
        )

        def count_encoded(done: int, total: int) -> None:
            report_encoding(done, total)
            if is_stopped():
                raise TrainingStoppedError

        data = _encode(base, request, count_encoded)
        warnings = (*request.data.warnings, *data.warnings)
        for warning in warnings:
            warn(warning)
        trainer = _make_trainer(base, data, request, device)
        fitting = [each for each in request.data.test if each.line in data.test_lines]
        test_prompts = write_test_data(request.folder, fitting)
        _check_early(trainer, base, data, request)
        is_continued = trainer.start()
        notify(_describe_plan(trainer, request, is_continued=is_continued))
        record = trainer.train(report=report, is_stopped=is_stopped)
        notify(_describe_end(record))
        write_adapter(trainer.model, base, request.folder.adapter)
        training = _describe_training(record, request)
        trained = TrainedAdapter(
            request, record, data.longest_answer, training, test_prompts, warnings
        )
        trained.write_manifest()
    return trained


@contextmanager
def _open_folder(request: TrainingRequest) -> Iterator[None]:
    folder = request.folder
    if folder.path.exists() and not folder.path.is_dir():
        raise UsageError(f"{folder.path} is a file", hint="name another package with -o FILE")
    with disk_errors(folder.path):
        make_folders(folder.adapter)
        with hold_lock(folder.lock, guarded=folder.path, seconds=0.1):
            if request.restart:
                folder.checkpoint.unlink(missing_ok=True)
                remove_tree(folder.adapter)
                make_folders(folder.adapter)
            yield


def _encode(base: TrainingBase, request: TrainingRequest, report: CountProgress) -> EncodedData:
    taken = request.options.virtual_tokens if request.options.kind == "prompt" else 0
    data = request.data
    done, total = 0, len(data.train) + len(data.held_out) + len(data.test)

    def count(encoded: int) -> None:
        nonlocal done
        done += encoded
        report(done, total)

    return encode_data(base.tokenizer, data, context=base.context - taken, progress=count)


def _make_trainer(
    base: TrainingBase, data: EncodedData, request: TrainingRequest, device: str
) -> Trainer:
    return Trainer(
        add_adapter(base, request.options),
        data,
        request.options,
        checkpoint=request.folder.checkpoint,
        settings=_collect_settings(base, request, device),
        device=device,
        vocab=int(base.model.config.get_text_config().vocab_size),
    )


def _collect_settings(base: TrainingBase, request: TrainingRequest, device: str) -> Settings:
    """Return what decides the result; a checkpoint continues only with equal settings."""
    identity = request.base.identity
    return {
        "data": str(request.data.digest),
        "base": str(identity.weights or identity.arch),
        "tokenizer": str(identity.tokenizer),
        "dtype": base.dtype,
        "device": device,
        **request.options.to_json(),
    }


def _check_early(
    trainer: Trainer, base: TrainingBase, data: EncodedData, request: TrainingRequest
) -> None:
    """Check the manifest, the adapter with its first values, and the space on the disk."""
    size = sum(weight.numel() * 4 for weight in list_trained(trainer.model).values())
    free = shutil.disk_usage(request.folder.path).free
    if free < _SAVED_COPIES * size:
        raise DiskFullError(
            f"checkpoints and the package need {format_size(_SAVED_COPIES * size)}, and "
            f"{format_size(free)} are free in {request.folder.path}",
            hint="free some space, or name a package elsewhere with -o FILE",
        )
    write_adapter(trainer.model, base, request.folder.adapter)
    write_training_manifest(
        request.folder,
        request.overrides,
        request.data,
        base=request.facts,
        longest_answer=data.longest_answer,
        training={},
    )
    plan_build(request.folder.adapter, request.overrides, base=request.facts)


def _describe_plan(trainer: Trainer, request: TrainingRequest, *, is_continued: bool) -> str:
    record, data, options = trainer.record, request.data, request.options
    if is_continued:
        if record.ended:
            return f"{request.folder.path} has the finished training; its package is built"
        return f"continuing after step {record.step} of {record.steps} in {request.folder.path}"
    tokens = sum(len(example.ids) for example in trainer.data.train)
    rank = f" of rank {options.rank}" if options.kind in {"lora", "dora"} else ""
    text = (
        f"training {options.kind}{rank} on {len(trainer.data.train)} examples ({tokens:,} tokens), "
        f"{len(trainer.data.held_out)} held out, {len(data.test)} for the test; "
        f"{record.steps} steps"
    )
    if not trainer.measured_speed:
        return text
    seconds = record.steps / trainer.steps_per_epoch * tokens / trainer.measured_speed
    wanted = options.epochs * trainer.steps_per_epoch
    limited = f", of {wanted} that take longer" if record.steps < wanted else ""
    expected = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"{text}{limited}: about {expected} at {trainer.measured_speed:.0f} tokens/s"


def _describe_end(record: TrainingRecord) -> str:
    why = {
        "steps": "",
        "early": ", because the held-out loss no longer fell",
        "time": ", because the time was up",
    }[record.ended]
    return (
        f"trained {record.step} of {record.steps} steps{why}; held-out loss "
        f"{record.first_loss:.3f} before, {record.best_loss:.3f} after step {record.best_step}"
    )


def _describe_training(record: TrainingRecord, request: TrainingRequest) -> JsonObject:
    """Return the record of the training for the manifest; it has no times and no machine."""
    data = request.data
    settings: JsonObject = {n: value for n, value in record.settings.items() if n != "data"}
    counts = {"train": len(data.train), "held_out": len(data.held_out), "test": len(data.test)}
    done = {
        name: value
        for name, value in asdict(record).items()
        if name in {"steps", "step", "tokens", "best_step", "ended"}
    }
    return {
        "data": {"name": data.path.name, "digest": str(data.digest), "examples": {**counts}},
        "settings": settings,
        "progress": done,
        "held_out_loss": {
            "before": round(record.first_loss, 4),
            "after": round(record.best_loss, 4),
        },
        "libraries": dict(find_library_versions()),
    }
