"""What the numbers of a base depend on, and whether a saved plan still means the same."""

from expertctl.digest import Digest
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import read_config
from expertctl.routing.plan import NumericSettings, Plan
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
