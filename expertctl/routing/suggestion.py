"""What the user may have meant by the name of an expert that is not installed."""

from collections.abc import Iterable, Sequence

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.reference import PackageName
from expertctl.routing.candidate import Installed
from expertctl.routing.request import Target
from expertctl.store.store import near_names

_MOST = 3


def names_like(name: PackageName, known: Iterable[PackageName]) -> list[str]:
    """Return up to three names: those of another namespace first, then those spelt alike."""
    others = sorted(set(known) - {name})
    twins = [str(other) for other in others if other.name == name.name]
    near = near_names(str(name), map(str, others)) if len(twins) < _MOST else []
    return list(dict.fromkeys([*twins, *near]))[:_MOST]


def did_you_mean(name: PackageName, known: Iterable[PackageName]) -> str:
    """Ask whether a similar name was meant; empty when none is similar."""
    near = names_like(name, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def not_installed(target: Target, installed: Sequence[Installed]) -> NotFoundError:
    """Return the error for an expert that was named and is not there, with the way out."""
    hint = _way_out(target, installed) or "`expertctl list` shows what is installed"
    return NotFoundError(f"{target} is not installed", hint=hint)


def idle_exclusions(exclude: Sequence[Target], installed: Sequence[Installed]) -> list[str]:
    """Warn of exclusions that exclude nothing."""
    idle = [t for t in exclude if not any(_is_named(t, expert) for expert in installed)]
    return [_warning(target, installed) for target in idle]


def _is_named(target: Target, expert: Installed) -> bool:
    """Tell whether a target means an expert, or the whole package of which it is a prerelease."""
    if isinstance(target, Digest) or target.digest or target.constraint.bounds:
        return expert.is_meant(target)
    return target.package == expert.stored.package


def _warning(target: Target, installed: Sequence[Installed]) -> str:
    way_out = _way_out(target, installed)
    tail = f"; {way_out}" if way_out else ""
    return f"{target} is excluded, and no such expert is installed{tail}"


def _way_out(target: Target, installed: Sequence[Installed]) -> str:
    """Name the installed versions, else names that look alike."""
    if isinstance(target, Digest):
        return "`expertctl list --json` shows digests"
    versions = {e.stored.version for e in installed if e.stored.package == target.package}
    if versions:
        return f"installed: {', '.join(map(str, sorted(versions)))}"
    return did_you_mean(target.package, (expert.stored.package for expert in installed))
