"""The experts of the starter pack: held-out prompts reach theirs, unrelated ones reach none."""

from functools import cache

import pytest

from examples.starter.pack import manifest as packed_manifest
from examples.starter.tasks import TASKS, Task, held_out
from expertctl.routing.candidate import Candidate, Installed, measure, unfit_for_prompt
from expertctl.routing.choice import choose
from expertctl.routing.encoder import Encoder, find_minilm
from expertctl.routing.features import features_of
from expertctl.routing.index import RoutingIndex
from expertctl.routing.lexical import LexicalEncoder
from expertctl.routing.minilm import open_minilm
from expertctl.routing.score import DEFAULT_BUDGET
from tests.routing.experts import installed, manifest

UNRELATED = (
    "What is the capital of France?",
    "Tell me a joke",
    "Write a poem about rain",
    "Who wrote Hamlet?",
    "How do I bake bread?",
    "Explain photosynthesis in simple words",
    "What is the weather like today?",
    "Translate good morning into Spanish",
    "Write a short story about a dragon",
    "Summarise the plot of Moby Dick",
    "Write a function that reverses a string in Python",
    "Give me a recipe for pancakes",
    "What is 12 times 7?",
    "Why is the sky blue?",
    "Hello, how are you?",
    "Write an email to my boss asking for leave",
)
ENCODERS = ["lexical"] + (["minilm"] if find_minilm() else [])


@cache
def encoder(name: str) -> Encoder:
    found = find_minilm()
    return open_minilm(found) if name == "minilm" and found else LexicalEncoder()


@pytest.fixture(scope="module", params=ENCODERS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoutingIndex:
    made = RoutingIndex(tmp_path_factory.mktemp("starter"), encoder(request.param))
    made.add({expert.digest: expert.manifest for expert in EXPERTS})
    return made


def starter(task: Task) -> Installed:
    routing = dict(packed_manifest(task)["routing"])  # type: ignore[call-overload]  # a JSON object
    texts = {k: tuple(v) if isinstance(v, list) else v for k, v in routing.items()}
    return installed(manifest(task.name, description=task.description, **texts), size=200_000)


EXPERTS = [starter(task) for task in TASKS]


def routed(index: RoutingIndex, prompt: str) -> list[str]:
    features = features_of(prompt)
    found = index.search(prompt)
    measured = [
        measure(e, features, found[e.digest], success=None, budget=DEFAULT_BUDGET) for e in EXPERTS
    ]
    judged = [c.refused(why) if (why := unfit_for_prompt(c, features)) else c for c in measured]
    judged.sort(key=order)
    chosen, _ = choose(judged, EXPERTS, max_experts=10)
    return [choice.expert.manifest.name for choice in chosen]


def order(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.order


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_held_out_prompts_reach_their_expert(index: RoutingIndex, task: Task) -> None:
    count = 200 if index.encoder.name == "lexical" else 60
    prompts = [sample.prompt for sample in held_out(task, count, seed=11)]
    lost = [p for p in prompts if routed(index, p) != [task.name]]
    assert len(lost) <= 0.03 * count, lost


@pytest.mark.parametrize("prompt", UNRELATED)
def test_unrelated_prompts_reach_none(index: RoutingIndex, prompt: str) -> None:
    assert routed(index, prompt) == []
