"""``/moe``: what is counted of routed experts. GET changes nothing; POST does.

The answer is the activity document of `expertctl.engine.moe`, from which experts can be placed. A
profile comes as a document, or as the name of the base, which stands for the habits learnt here:
there is no way to name a file.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from expertctl.engine.moe.adoption import ProfileWishes
from expertctl.engine.moe.counters import Mode
from expertctl.engine.moe.pins import Pins, parse_pins
from expertctl.errors import UsageError
from expertctl.package.experts_config import MAX_COUNT
from expertctl.schema.strict_json import JsonObject
from expertctl.server.field_error import FieldError

_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Share = Annotated[str, Meta(max_length=8, examples=["50%"])]
_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class ObserveRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is counted of routed experts from now on, and which profile says which stay."""

    mode: Annotated[
        Mode | None,
        Meta(description="All, what an exchange needs, or nothing; another mode begins again."),
    ] = None
    reset: Annotated[bool, Meta(description="Begin again in any case.")] = False
    profile: Annotated[
        _Name | dict[str, Any] | None,
        Meta(description="A profile; or the name of the base, for what was learnt of it."),
    ] = None
    pin: Annotated[
        _Count | _Share | None,
        Meta(
            description="So many of each layer stay, or those that a share of tokens ask for; else "
            "as the server was started."
        ),
    ] = None
    exchange: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(
            description="The share of residents that an update may exchange for others of the "
            "profile; else as the server was started."
        ),
    ] = None

    def check(self, *, base: str) -> None:
        """Refuse a body that asks for no change, or for the profile of another base.

        Raises:
            FieldError: naming the field that is wrong.
        """
        _demand_profile(self)
        if self.mode is None and not self.reset and self.profile is None:
            raise FieldError(
                "the body asks for no change",
                field="mode",
                hint='give {"mode": "full"}, "update" or "off", {"reset": true}, or a "profile"',
            )
        if isinstance(self.profile, str) and self.profile != base:
            raise FieldError(
                f"profile: this server answers on {base}, not on {self.profile[:80]!r}",
                field="profile",
                hint=f"name {base}, or give the document that `base profile export` writes",
            )

    @property
    def document(self) -> JsonObject | None:
        """The profile of the body; None stands for what was learnt of the base."""
        return self.profile if isinstance(self.profile, dict) else None

    @property
    def wishes(self) -> ProfileWishes:
        """The pins and the exchange rate that are wanted for the profile.

        Raises:
            FieldError: when ``pin`` is neither a number of experts nor a share.
        """
        return ProfileWishes(pins=self._pins, exchange=self.exchange)

    @property
    def _pins(self) -> Pins | None:
        if self.pin is None:
            return None
        try:
            return parse_pins(str(self.pin))
        except UsageError as error:
            raise FieldError(f"pin: {error.message}", field="pin", hint=error.hint) from error


def _demand_profile(body: ObserveRequest) -> None:
    """Refuse ``pin`` and ``exchange`` without a profile."""
    for name, value in (("pin", body.pin), ("exchange", body.exchange)):
        if value is not None and body.profile is None:
            raise FieldError(
                f"{name}: that is done for a profile, and none is given",
                field=name,
                hint='give "profile" too: a document, or the name of the base for what was learnt',
            )
