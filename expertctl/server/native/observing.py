"""``/moe``: what is counted of routed experts. Whoever reads changes nothing; a post does.

The answer is the activity document of `expertctl.engine.moe`, from which experts can be placed.
"""

from msgspec import Struct

from expertctl.engine.moe.counters import Mode
from expertctl.server.field_error import FieldError


class ObserveRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is to be counted from now on; another mode begins again, the same does not."""

    mode: Mode | None = None
    """Everything, what an exchange of experts needs, or nothing."""
    reset: bool = False
    """Whether to begin again in any case."""

    def check(self) -> None:
        """Refuse what asks for nothing.

        Raises:
            FieldError: when it neither names a mode nor resets.
        """
        if self.mode is None and not self.reset:
            raise FieldError(
                "the body asks for no change",
                field="mode",
                hint='give {"mode": "full"}, "update" or "off", or {"reset": true}',
            )
