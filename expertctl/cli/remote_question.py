"""`RemoteQuestion`: a request of `run` or `chat` to a server, and what it continues.

Nothing of the engine is imported: a conversation is kept as its document, which the server checks.
Options that only an engine in this process honours are listed by `list_local_options`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from expertctl.cli.prompt_input import PromptInput
from expertctl.cli.run_options import EngineFlags, ExpertFlags, SamplingFlags, WarmupFlags
from expertctl.client.protocol import InferOptions
from expertctl.client.result import RunAnswer
from expertctl.errors import InvalidPackageError
from expertctl.user_request import SamplingOverrides, UserMessage

CHOSEN_BASE = "auto"
"""Stands for the base that a run in this process would choose."""


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer of a server."""

    document: Mapping[str, Any]
    """The document of ``run --json``."""
    answer: RunAnswer
    """The same, typed."""


class KeptMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class KeptConversation(msgspec.Struct, frozen=True):
    """The document of a conversation; its server checks the rest."""

    messages: tuple[KeptMessage, ...] = ()
    plan: dict[str, Any] | None = None

    @classmethod
    def parse(cls, data: bytes, *, what: str) -> Self:
        """Read a document.

        Raises:
            InvalidPackageError: when it is not one.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidPackageError(what, [str(error)]) from error

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        return next((one.content for one in self.messages if one.role == "system"), "")

    def with_system(self, text: str | None) -> "KeptConversation":
        """Return the same with another system message; with none for a blank text."""
        if text is None:
            return self
        first = (KeptMessage("system", text),) if text.strip() else ()
        rest = (one for one in self.messages if one.role != "system")
        return KeptConversation((*first, *rest), self.plan)

    def add_turn(
        self, message: str, answer: str, plan: dict[str, Any] | None
    ) -> "KeptConversation":
        """Return the same with one more turn."""
        turn = KeptMessage("user", message), KeptMessage("assistant", answer)
        return KeptConversation((*self.messages, *turn), plan)

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document if self.plan is not None else {"messages": document["messages"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteQuestion:
    """A prompt, what precedes it, and the options of its request."""

    prompt: str
    body: str | None
    template: str | None
    options: InferOptions
    earlier: KeptConversation
    is_own: bool
    """Whether it is for a server of this home, which then chooses the base as a run here does."""

    @property
    def fields(self) -> InferOptions:
        """All fields of the request except the prompt."""
        fields: InferOptions = {**self.options}
        if self.body is not None:
            fields["body"] = self.body
        if self.template is not None:
            fields["template"] = self.template
        if self.earlier.messages:
            fields["conversation"] = self.earlier.to_json()
        if self.is_own and "base" not in fields:
            fields["base"] = CHOSEN_BASE
        return fields

    @property
    def message(self) -> str:
        """The message of the user, as the model reads it."""
        return UserMessage(prompt=self.prompt, body=self.body, template=self.template).text()

    def add_turn(self, answer: RemoteAnswer) -> KeptConversation:
        """Return the conversation with the answer."""
        plan = answer.document["plan"]
        return self.earlier.add_turn(self.message, answer.answer.text, plan)


def build_sampling_options(sampling: SamplingOverrides, seed: int | None) -> InferOptions:
    """Return sampling settings as fields of a request."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop", "temperature")
    values: dict[str, Any] = {name: getattr(sampling, name) for name in names} | {"seed": seed}
    if sampling.greedy and not sampling.temperature:
        values["temperature"] = 0.0
    options: InferOptions = values  # type: ignore[assignment]  # each name is an option
    return options


def build_question(
    texts: PromptInput,
    options: InferOptions,
    *,
    template: str | None,
    is_own: bool,
    earlier: bytes = b"{}",
    system: str | None = None,
) -> RemoteQuestion:
    """Return the request of one prompt; ``earlier`` is the document of a conversation.

    The base that answered last answers again, unless a base or experts are named.

    Raises:
        InvalidPackageError: when that is not one.
    """
    kept = KeptConversation.parse(earlier, what="the last conversation")
    last = (kept.plan or {}).get("base")
    if is_own and isinstance(last, str) and not options.get("force_experts"):
        options = {"base": last, **options}
    return RemoteQuestion(
        prompt=texts.prompt,
        body=texts.body,
        template=template,
        options=options,
        earlier=kept.with_system(system),
        is_own=is_own,
    )


def build_options(
    experts: ExpertFlags, sampling: SamplingFlags, *, base: str | None, truncate: bool
) -> InferOptions:
    """Return the options of a request as its fields."""
    options: InferOptions = {
        **build_sampling_options(sampling.overrides, sampling.seed),
        "force_experts": list(experts.expert or ()),
        "exclude_experts": list(experts.exclude or ()),
        "max_experts": experts.max_experts,
        "no_experts": experts.no_experts,
        "truncate": truncate,
    }
    if base is not None:
        options["base"] = base
    return options


def list_local_options(
    experts: ExpertFlags,
    sampling: SamplingFlags,
    flags: EngineFlags,
    warmup: WarmupFlags,
    others: Mapping[str, bool],
) -> list[str]:
    """Return the given options that only an engine in this process honours.

    ``others`` are more of them, and whether they are given.
    """
    numerics, miss = flags.numerics, flags.miss
    named = [text for text in experts.expert or () if _is_file(text)]
    given = {
        **{f"--expert {text}": True for text in named},
        "--allow-base-mismatch": experts.allow_base_mismatch,
        "--greedy with --temperature": sampling.greedy and bool(sampling.temperature),
        "--device": flags.device is not None,
        "--memory-budget": flags.memory_budget is not None,
        "--dtype": numerics.dtype is not None,
        "--adapter-dtype": numerics.adapter_dtype is not None,
        "--deterministic": numerics.deterministic is not None,
        "--moe-miss": miss.moe_miss != "exact" or miss.moe_skip_cap is not None,
        "--moe-cold": warmup.moe_cold is not None,
        "--moe-profile": warmup.moe_profile is not None,
        "--moe-pin": warmup.moe_pin is not None,
        "--moe-warmup": warmup.moe_warmup is not None,
        "--moe-exchange": warmup.moe_exchange != 0.0,
        **{f"--{name.replace('_', '-')}": is_given for name, is_given in others.items()},
    }
    return [name for name, is_given in given.items() if is_given]


def _is_file(text: str) -> bool:
    """Tell whether an expert may be named by its file; then it is read in this process."""
    path = text.rpartition(":")[0] if ":" in text.rpartition("/")[2] else text
    if text.startswith("sha256:"):
        return False
    return path.endswith(".expert") or text.startswith((".", "/", "~")) or Path(path).is_file()
