"""``expertctl why``: why an expert is installed, and what depends on it."""

from dataclasses import asdict
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, emit, warn
from expertctl.errors import NotFoundError
from expertctl.install.why import Requirer, Vouching, Why
from expertctl.install.why import why as explain
from expertctl.settings import load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.preference import (
    VersionUsage,
    read_preference,
    usage_of,
    working_folder,
)
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.store import Store, parse_wanted
from expertctl.trust.policy import TrustStore


def why(
    ref: Annotated[str, typer.Argument(metavar="REF", help="An installed expert.")],
    as_json: JsonFlag = False,
) -> None:
    """Show why an expert is installed. Who requires it, who signed it, what would miss it?

    Example: expertctl why acme/sql
    """
    home = load_settings().home
    preference = read_preference(home, working_folder())
    store = Store(home.store, preference)
    expert, now = store.find(parse_wanted(ref)), store.scan()
    if expert not in now.experts:
        raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile")
    warn([*(damaged.warning for damaged in now.damaged), *preference.pins.problems])
    found = explain(
        expert,
        installed=now.experts,
        bases=BaseStore(home.bases).bases(),
        trust=TrustStore(home.trust).read(),
    )
    usage = usage_of(expert, now.experts, preference)
    emit({**_document(found), **asdict(usage)}, _text(found, usage), as_json=as_json)


def _document(found: Why) -> dict[str, object]:
    expert, base = found.expert, found.expert.base
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "registry": expert.registry,
        "required_by": [_requirer_document(requirer) for requirer in found.required_by],
        "breaks": list(found.breaks),
        "signature": _vouching_document(found.vouching) if found.vouching else None,
        "base": {"name": base.name, "revision": base.revision, "here": list(found.bases)},
        "warnings": list(expert.warnings),
    }


def _requirer_document(requirer: Requirer) -> dict[str, object]:
    chain = [{"ref": link.ref, "requires": link.wanted} for link in requirer.chain]
    return {"ref": requirer.ref, "chain": chain}


def _vouching_document(vouching: Vouching) -> dict[str, object]:
    grant = vouching.grant
    return {
        "key_id": vouching.key_id,
        "name": vouching.name,
        "trusted": grant is not None and vouching.revoked is None,
        "namespace": grant.namespace if grant else None,
        "only_listed_content": grant is not None and grant.content_digests is not None,
        "revoked": vouching.revoked,
    }


def _text(found: Why, usage: VersionUsage) -> str:
    expert = found.expert
    lines = [expert.ref, *_usage_lines(expert, usage), *_required_lines(found)]
    lines.append(_source(expert.registry))
    lines.append(_vouching_line(found.vouching, expert.package.namespace))
    lines.append(_base_line(found))
    if found.breaks:
        lines.append(f"without it these will not run: {', '.join(found.breaks)}")
    else:
        lines.append("nothing stops running without it")
    return "\n  ".join([*lines, *(f"warning: {warning}" for warning in expert.warnings)])


def _usage_lines(expert: StoredExpert, usage: VersionUsage) -> list[str]:
    """Say whether this version is used where none is named; nothing where that is clear."""
    if usage.used and not (usage.others or usage.pinned) and usage.yanked is None:
        return []
    if usage.used:
        line = "used where no version is named"
    elif usage.used_instead is not None:
        line = f"not used where no version is named: {usage.used_instead} is"
    else:
        line = "used only where it is named: it is a prerelease"
    if usage.pinned is not None:
        line += f"; {usage.pinned} names it"
    if usage.yanked is not None:
        why = f": {usage.yanked}" if usage.yanked else ""
        line += f"; it was yanked{why}, `expertctl remove {expert.ref}` removes it"
    return [line]


def _required_lines(found: Why) -> list[str]:
    """Write each chain from the requirer down: ``acme/top@1.0.0 → acme/middle@^1 → acme/sql``."""
    chains = [
        " → ".join([requirer.ref, *(link.wanted for link in requirer.chain)])
        for requirer in found.required_by
    ]
    return [f"required by {chain}" for chain in chains] or ["nothing requires it"]


def _source(registry: str) -> str:
    return "it came from a file" if registry == LOCAL else f"it came from {registry}"


def _vouching_line(vouching: Vouching | None, namespace: str) -> str:
    if vouching is None:
        return "nobody signed it: it was installed with --allow-unsigned"
    key = f"{vouching.name or 'a key'} ({vouching.key_id})"
    if vouching.revoked is not None:
        return f"signed by {key}, which was revoked: {vouching.revoked or 'no reason given'}"
    if vouching.grant is None:
        return f"signed by {key}, which is not trusted for {namespace}/* any more"
    limits = ", for listed contents only" if vouching.grant.content_digests is not None else ""
    return f"signed by {key}, which is trusted for {namespace}/*{limits}"


def _base_line(found: Why) -> str:
    base = found.expert.base
    label = base.name + (f"@{base.revision[:12]}" if base.revision else "")
    if not found.bases:
        return f"made for the base {label}, which is not here"
    others = [name for name in found.bases if name != base.name]
    return f"made for the base {label}, which is here{f' as {others[0]}' if others else ''}"
