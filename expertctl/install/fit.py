"""Whether a package fits the bases that this machine knows."""

from collections.abc import Sequence

from expertctl.errors import BaseMismatchError
from expertctl.package.compatibility import check_base, check_tensors
from expertctl.package.read import PackageContents
from expertctl.routing.base_choice import widths_of
from expertctl.store.base_record import StoredBase
from expertctl.store.ref import MISMATCH


def fit(
    contents: PackageContents, bases: Sequence[StoredBase], *, allow_mismatch: bool = False
) -> tuple[list[str], list[str]]:
    """Check a package against the base it was made for, if that is known.

    Returns the warnings that stay with the expert, and those of the moment.

    Raises:
        BaseMismatchError: when it was made for another base of that name, or when its tensors do
            not fit the base it was made for.
    """
    manifest = contents.manifest
    for base in bases:
        try:
            warnings = check_base(manifest, base.identity)
        except BaseMismatchError:
            continue
        _refuse_tensors(contents, base)
        return warnings, []
    namesake = next((base for base in bases if base.name == manifest.base.name), None)
    if namesake is None:
        return [], [_not_added(contents)]
    problems = _tensor_problems(contents, namesake)
    warnings = check_base(
        manifest,
        namesake.identity,
        allow_mismatch=allow_mismatch,
        shapes_agree=not problems,
        widths=widths_of(bases),
    )
    return warnings + [f"{manifest.ref}: {MISMATCH}: {problem}" for problem in problems], []


def _refuse_tensors(contents: PackageContents, base: StoredBase) -> None:
    problems = _tensor_problems(contents, base)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise BaseMismatchError(
            f"{contents.manifest.ref} does not fit the base {base.name}:{lines}",
            hint="its publisher must build it again against this base",
        )


def _tensor_problems(contents: PackageContents, base: StoredBase) -> list[str]:
    return [
        p for spec in contents.adapters for p in check_tensors(spec, base.shapes, base=base.name)
    ]


def _not_added(contents: PackageContents) -> str:
    base = contents.manifest.base
    return (
        f"{contents.manifest.ref}: its base {base.name} is not added yet, so its tensors were not "
        f"checked against it; `expertctl base add DIR` with the base's directory"
    )
