"""``expertctl list``: the installed experts. Imports none of the libraries of other commands."""

from expertctl.cli.output import JsonFlag, emit, format_table, note, warn
from expertctl.settings import format_size, load_settings
from expertctl.store.preference import (
    FlagsByDigest,
    SignerNames,
    VersionPreference,
    find_working_folder,
    flags_to_json,
    read_flags,
    read_preference,
)
from expertctl.store.refs import LOCAL, StoredExpert, StoreScan
from expertctl.store.store import Store


def list_experts(as_json: JsonFlag = False) -> None:
    """List the installed experts.

    Versions that are yanked, pinned by a list or lock file, or not used are marked.

    Example: expertctl list --json
    """
    home = load_settings().home
    now, preference = Store(home.store).scan(), read_preference(home, find_working_folder())
    flagged = read_flags(home.flagged)
    warn([*(ref.warning for ref in now.damaged), *preference.pins.problems])
    if not (now.experts or now.damaged):
        note("no experts yet; `expertctl install REF`, or `expertctl install FILE`, installs one")
    emit(
        _build_document(now, preference, flagged),
        _format_experts(now, preference, flagged),
        as_json=as_json,
    )


def _build_document(
    now: StoreScan, preference: VersionPreference, flagged: FlagsByDigest
) -> dict[str, object]:
    damaged = [{"ref": d.name, "path": str(d.path), "problem": d.problem} for d in now.damaged]
    used = preference.select_used(now.experts)
    experts = [
        {
            **build_expert_document(expert, preference.signers, flagged),
            "flags": _list_all_flags(expert, preference, flagged),
            "used": used.get(expert.package) == expert,
            "yanked": preference.find_yank_reason(expert),
        }
        for expert in now.experts
    ]
    return {"experts": experts, "damaged": damaged}


def build_expert_document(
    expert: StoredExpert, signers: SignerNames, flagged: FlagsByDigest
) -> dict[str, object]:
    """Return an installed expert as ``--json`` shows it."""
    return {
        "ref": expert.ref,
        "name": str(expert.package),
        "version": str(expert.version),
        "registry": expert.registry,
        "base": expert.base.name,
        "size": expert.size,
        "signer": expert.signer,
        "signer_name": signers.names.get(expert.signer or ""),
        "flags": list_flags(expert, signers, flagged),
        "suspicions": flags_to_json(flagged.get(expert.content_digest, ())),
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "warnings": list(expert.warnings),
    }


def list_flags(expert: StoredExpert, signers: SignerNames, flagged: FlagsByDigest) -> list[str]:
    """Return what is unusual about an installed expert, one word for each fact."""
    flags = {
        "unsigned": expert.signer is None,
        "revoked": signers.has_revoked(expert),
        "mismatch": expert.allows_mismatch,
        "suspicious": expert.content_digest in flagged,
    }
    return [name for name, holds in flags.items() if holds]


def _list_all_flags(
    expert: StoredExpert, preference: VersionPreference, flagged: FlagsByDigest
) -> list[str]:
    """Return the flags of an expert, with ``yanked`` and ``pinned``."""
    yanked = ["yanked"] if preference.find_yank_reason(expert) is not None else []
    pinned = ["pinned"] if preference.find_pin(expert) is not None else []
    return [*list_flags(expert, preference.signers, flagged), *yanked, *pinned]


def _format_flags(
    expert: StoredExpert,
    used: StoredExpert | None,
    preference: VersionPreference,
    flagged: FlagsByDigest,
) -> str:
    """Return the flags of an expert, with ``unused`` where its name selects another version."""
    unused = ["unused"] if used != expert else []
    return " ".join([*_list_all_flags(expert, preference, flagged), *unused])


def _format_registry(expert: StoredExpert) -> str:
    return "(file)" if expert.registry == LOCAL else expert.registry


def _format_experts(now: StoreScan, preference: VersionPreference, flagged: FlagsByDigest) -> str:
    used = preference.select_used(now.experts)
    rows = [
        [
            str(expert.package),
            str(expert.version),
            _format_registry(expert),
            expert.base.name,
            format_size(expert.size),
            preference.signers.display_name(expert.signer),
            _format_flags(expert, used.get(expert.package), preference, flagged),
        ]
        for expert in now.experts
    ]
    header = ["NAME", "VERSION", "REGISTRY", "BASE", "SIZE", "SIGNER", "FLAGS"]
    return format_table(header, rows, shorten=("REGISTRY", "BASE", "SIGNER")) if rows else ""
