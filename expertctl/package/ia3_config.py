"""What the configuration of an IA³ adapter decides about its tensors."""

from dataclasses import dataclass
from typing import Any, Literal

from expertctl.package.targets import literals, names_module
from expertctl.schema.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class Ia3Config:
    """Which modules get factors, and which of them on their inputs."""

    target_modules: frozenset[str] | None
    """Literal module names; ``None`` where a pattern was given: then the tensors decide."""
    exclude_modules: frozenset[str]
    feedforward_modules: frozenset[str] | None
    """As ``target_modules``: with ``None`` the shapes decide."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["ia3"]:
        """The kind of adapter."""
        return "ia3"

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can mean a module, as PEFT chooses its targets."""
        if names_module(self.exclude_modules, module):
            return False
        return self.target_modules is None or names_module(self.target_modules, module)

    def on_input(self, module: str) -> bool | None:
        """Tell whether a module's inputs are scaled; ``None`` where its tensor must show it.

        PEFT takes any ending of a module's name here, not only a dotted one. Both names are
        untrusted, so the endings are looked up, which takes the same time for any number of names.
        """
        names = self.feedforward_modules
        if names is None:
            return None
        return any(module[start:] in names for start in range(len(module)))


def ia3_config_of(document: JsonObject) -> Ia3Config:
    """Return a configuration that the schema let through."""
    values: dict[str, Any] = dict(document)
    return Ia3Config(
        target_modules=literals(values.get("target_modules")),
        exclude_modules=literals(values.get("exclude_modules")) or frozenset(),
        feedforward_modules=literals(values.get("feedforward_modules")),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
