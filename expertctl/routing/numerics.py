"""What the numbers of a base depend on, and whether a saved plan still means the same."""

from expertctl.errors import IncompatibleError
from expertctl.package.model_config import read_config
from expertctl.routing.plan import NumericSettings, Plan, plan_identity
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


def check_identity(plan: Plan, settings: NumericSettings) -> None:
    """Check that a saved plan would give the same numbers now.

    Raises:
        IncompatibleError: when its identity is another one.
    """
    experts = [(expert.content_digest, expert.weight) for expert in plan.experts]
    now = plan_identity(settings, experts)
    if now != plan.identity:
        raise IncompatibleError(
            f"the plan was made as {str(plan.identity)[:19]}…, here it would be {str(now)[:19]}…: "
            "another base, dtype, adapter dtype or version of the engine",
            hint="run it with the base and --dtype it was made with, or route the prompt again",
        )
