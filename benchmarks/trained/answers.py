"""Greedy answers of a merged base and of the experts for it, by the engine that users run.

Each expert is packaged for each base and given to the engine as a file. Answers are generated in
batches, as `expertctl eval` does. Base, home and packages stay below one folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trained.merged_base import MergedBase
from benchmarks.trained.tasks import TASKS, Sample, Task, count_exact
from expertctl.engine.offline import MIN_BATCH_PROMPTS, open_batch_answering
from expertctl.engine.request import FileExpert, RunRequest
from expertctl.engine_config import AdapterDtype, Dtype, EngineConfig
from expertctl.errors import ignore_notification
from expertctl.package.base_model import read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.user_request import SamplingOverrides, UserMessage

VERSION = "1.0.0"
BATCH = 16


@dataclass(frozen=True, slots=True)
class BaseWithExperts:
    """A registered base, the planner of its home, and the packages of experts by task name."""

    stored: StoredBase
    planner: Planner
    packages: dict[str, Path]

    def answer(
        self,
        prompts: Sequence[str],
        task: str | None,
        *,
        dtype: Dtype,
        adapter_dtype: AdapterDtype = "published",
        max_tokens: int,
    ) -> list[str]:
        """Return the answers of the expert for a task; of the base alone if it has none."""
        config = EngineConfig(base=self.stored.name, dtype=dtype, adapter_dtype=adapter_dtype)
        package = self.packages.get(task or "")
        requests = [self._make_request(p, package, config, max_tokens) for p in prompts]
        assert len(prompts) >= MIN_BATCH_PROMPTS, "fewer prompts are not answered in a batch"
        found: dict[int, str] = {}
        with open_batch_answering(
            self.planner,
            self.stored,
            requests[0],
            batch_size=BATCH,
            notify=ignore_notification,
            numpy_below=0,
        ) as answering:
            for number, result in answering(requests):
                found[number] = result.generated.text
        return [found[number] for number in range(len(prompts))]

    def _make_request(
        self, prompt: str, package: Path | None, config: EngineConfig, max_tokens: int
    ) -> RunRequest:
        greedy = SamplingOverrides(greedy=True, max_tokens=max_tokens)
        route = RouteRequest(
            prompt=prompt, base_alone=package is None, sampling=greedy, config=config
        )
        experts = () if package is None else (FileExpert(package),)
        message = UserMessage(prompt=prompt)
        return RunRequest(message=message, route=route, experts=experts, base=self.stored.name)


def open_base(folder: Path, base: MergedBase) -> BaseWithExperts:
    """Register a base in the home below a folder, and package the experts that it has not merged.

    Existing packages are used again.
    """
    home, directory = Home(folder / "home"), base.directory(folder)
    planner = Planner.open(Settings(home, encoder="lexical"))
    stored = planner.bases.add(directory, name=directory.name)
    tasks = [task for task in TASKS.values() if task is not base.merged]
    packages = {task.name: _package_expert(folder, base, task) for task in tasks}
    return BaseWithExperts(stored, planner, packages)


def _package_expert(folder: Path, base: MergedBase, task: Task) -> Path:
    directory, adapter = base.directory(folder), folder / "experts" / task.name
    package = directory.with_name(f"{directory.name}-{task.name}.expert")
    if package.exists():
        return package
    facts = read_base(directory)
    overrides = ManifestOverrides(
        name=f"quality/{task.name}",
        version=VERSION,
        description=f"Answers the prompts of the task {task.name}.",
        license="Apache-2.0",
    )
    return build_package(plan_build(adapter, overrides, base=facts), package).path


def measure_accuracy(
    opened: BaseWithExperts,
    task: Task,
    samples: Sequence[Sample],
    *,
    dtype: Dtype,
    adapter_dtype: AdapterDtype = "published",
) -> float:
    """Return the share of samples that are answered exactly right."""
    answers = opened.answer(
        [sample.prompt for sample in samples],
        task.name,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        max_tokens=task.max_tokens,
    )
    return count_exact(samples, answers) / len(samples)
