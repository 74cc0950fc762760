"""The chat template that an expert brings: read from its verified package, used when it is alone.

An expert trained on a format of its own names it as ``decoding.chat_template``. Where the experts
of a plan bring different ones, none of them is right for all, so the base's is used, and that is
said. A template is untrusted text like that of a base, and rendered in the same sandbox.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expertctl.engine.chat_template import MAX_TEMPLATE_CHARACTERS
from expertctl.engine.tokenizer_config import TemplateSource
from expertctl.errors import InvalidPackageError
from expertctl.routing.candidate import Installed
from expertctl.routing.planner import Planned

_MAX_BYTES = 4 * MAX_TEMPLATE_CHARACTERS
"""The most that so many characters take in UTF-8."""

ReadFile = Callable[[Installed, str], bytes]
"""Returns one file of an expert, its digest checked."""


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The template of an expert, or ``None`` for the base's."""

    source: TemplateSource | None = None
    warnings: tuple[str, ...] = ()


def choose_template(planned: Planned, read: ReadFile) -> TemplateChoice:
    """Return the one template that the experts of a plan bring; weight 0 equals leaving one out.

    Raises:
        DigestError: when the file is not the one that was verified.
        InvalidPackageError: when it is too long or not text.
    """
    active = zip(planned.experts, planned.result.plan.experts, strict=True)
    brought: dict[str, TemplateSource] = {}
    for expert, chosen in active:
        path = expert.manifest.decoding.chat_template
        if path is not None and chosen.weight != 0.0:
            source = _source(expert, path, read)
            brought.setdefault(source.text, source)
    if len(brought) > 1:
        files = ", ".join(str(source.file) for source in brought.values())
        return TemplateChoice(warnings=(f"{files} differ: the chat template of the base is used",))
    return TemplateChoice(next(iter(brought.values()), None))


def _source(expert: Installed, path: str, read: ReadFile) -> TemplateSource:
    what = f"{expert.ref} {path}"
    size = expert.stored.file(path).size
    if size > _MAX_BYTES:
        raise InvalidPackageError(what, [f"{size} bytes, at most {_MAX_BYTES} allowed"])
    try:
        return TemplateSource(read(expert, path).decode("utf-8"), Path(what))
    except UnicodeDecodeError as error:
        raise InvalidPackageError(what, [f"not UTF-8 at byte {error.start}"]) from error
