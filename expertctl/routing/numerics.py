"""What the numbers of a base depend on, and whether a saved plan still means the same."""

from expertctl.digest import Digest
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import read_config
from expertctl.routing.plan import NumericSettings, Plan, PlannedExpert
from expertctl.store.base_record import StoredBase


def numeric_settings(base: StoredBase, *, dtype: str, adapter_dtype: str) -> NumericSettings:
    """Return the numeric settings of a base run in one dtype.

    Raises:
        IncompatibleError: when the decoder does not support such a model.
        InvalidPackageError: when its configuration is malformed.
    """
    return NumericSettings(
        arch=base.identity.arch,
        weights=base.identity.weights,
        tokenizer=base.identity.tokenizer,
        rope=read_config(base.path).rope.to_json(),
        dtype=dtype,
        adapter_dtype=adapter_dtype,
    )


def check_identity(plan: Plan, now: Digest) -> None:
    """Check that a saved plan gives the same numbers now: that its identity is still this one.

    Raises:
        IncompatibleError: when its identity is another one.
    """
    if now != plan.identity:
        raise IncompatibleError(
            f"the plan was made as {str(plan.identity)[:19]}…, here it would be {str(now)[:19]}…: "
            "another base, dtype or version of the engine, or the plan was edited",
            hint="run it with the base and --dtype it was made with, or route the prompt again",
        )


def compare_experts(before: PlannedExpert, now: PlannedExpert) -> list[str]:
    """Return what a person should know of an expert of a saved plan whose content is the same.

    Raises:
        IncompatibleError: when its name or kind is not what that content says.
    """
    if (before.ref, before.kind) != (now.ref, now.kind):
        raise IncompatibleError(
            f"the plan says {before.ref}, {before.kind}, of what is {now.ref}, {now.kind}: "
            "it was edited",
            hint="route the prompt again",
        )
    if before.package_digest == now.package_digest:
        return []
    return [
        f"{now.ref} was signed anew since the plan was saved: the same content, but its package is "
        f"{now.package_digest} instead of {before.package_digest}"
    ]
