"""Package the trained experts: `python -m examples.starter.pack --base DIR --adapters DIR`.

The key is made here, used once and never written; what the pack pins is the public half, valid for
the content digests of these very packages.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from examples.starter.compositions import COMPOSITIONS
from examples.starter.experts import EXPERTS
from examples.starter.samples import Task, training
from expertctl.install.installer import STARTER, STARTER_MANIFEST
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.trust.keys import PrivateKey

BASE_NAME = "starter/base"
VERSION = "1.0.0"
ROUTING_EXAMPLES = 60
TASK_ORDER, STYLE_ORDER = 5, 6
README = """# {name}

{description}

Trained for the starter pack of expertctl on a base of about two million weights by
`examples/starter`; it does this task and nothing else.
"""


def main() -> None:
    """Copy the base, build and sign one package per task, write the pins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base")
    parser.add_argument("--adapters", type=Path, required=True, help="folder of adapters' folders")
    parser.add_argument("--out", type=Path, default=STARTER, help="where the pack goes")
    options = parser.parse_args()
    pack(options.base, options.adapters, options.out)


def pack(base: Path, adapters: Path, out: Path) -> None:
    """Write the whole pack to ``out``, replacing what is there."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(base, out / "base")
    facts = read_base(out / "base", name=BASE_NAME)
    key = PrivateKey.generate("ecdsa-p256")
    experts = {
        (file := f"{task.short_name}.expert"): _package(
            task, adapters / task.short_name, out / file, facts, key
        )
        for task in EXPERTS
    }
    identity = facts.identity
    pins = {
        "base": {
            "name": BASE_NAME,
            "arch": str(identity.arch),
            "weights": str(identity.weights),
            "tokenizer": str(identity.tokenizer),
        },
        "public_key": key.public.pem().decode(),
        "experts": experts,
    }
    (out / STARTER_MANIFEST).write_text(json.dumps(pins, indent=2) + "\n")


def manifest(task: Task) -> dict[str, object]:
    """What the task's manifest says beyond what building infers."""
    return {
        "schema": 1,
        "name": task.name,
        "version": VERSION,
        "description": task.description,
        "license": "Apache-2.0",
        "tags": ["starter"],
        "routing": {
            "task": task.preset,
            "languages": ["en"],
            "examples": routing_examples(task),
            "keywords": list(task.keywords),
            "exclude_keywords": list(task.exclude_keywords),
        },
        "composition": composition(task),
        "decoding": {"temperature": 0.0, "max_tokens": 256, "repetition_penalty": 1.0},
        "training": {"method": "sft", "dataset": "examples/starter", "steps": task.steps},
    }


def composition(task: Task) -> dict[str, object]:
    """The experts with which this one was measured in a plan; styles come last in it."""
    plans = [each.plan for each in COMPOSITIONS if task in each.plan]
    partners = [other.short_name for plan in plans for other in plan if other is not task]
    last = any(task is plan[-1] for plan in plans)
    return {
        "role": task.short_name,
        "composes_with": partners,
        "load_order": STYLE_ORDER if last else TASK_ORDER,
    }


def routing_examples(task: Task) -> list[str]:
    """The task's own examples, and training prompts: routing needs the variety of real prompts."""
    asked = replace(task, drill=None)
    drawn = (sample.prompt for sample in training(asked, ROUTING_EXAMPLES, seed=1))
    return list(dict.fromkeys([*task.examples, *drawn]))


def _package(task: Task, adapter: Path, file: Path, facts: BaseFacts, key: PrivateKey) -> str:
    """Build one package; return its content digest."""
    (adapter / "expert.json").write_text(json.dumps(manifest(task), indent=2) + "\n")
    readme = README.format(name=task.name, description=task.description)
    (adapter / "README.md").write_text(readme)
    built = build_package(plan_build(adapter, ManifestOverrides(), base=facts), file, key=key)
    return str(built.content_digest)


if __name__ == "__main__":
    main()
