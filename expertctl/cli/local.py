"""``expertctl list``: what is installed. Imports none of the libraries of other commands."""

from expertctl.cli.output import JsonFlag, emit, human_size, note, table, warn
from expertctl.settings import load_settings
from expertctl.store.flags import Flagged, flag_documents, read_flagged
from expertctl.store.paths import Scan
from expertctl.store.preference import Preference, read_preference, working_folder
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.signers import Signers
from expertctl.store.store import Store


def list_(as_json: JsonFlag = False) -> None:
    """List the installed experts.

    Versions that were yanked, are named exactly by a list or lock file, or are not used are marked.

    Example: expertctl list --json
    """
    home = load_settings().home
    now, preference = Store(home.store).scan(), read_preference(home, working_folder())
    flagged = read_flagged(home.flagged)
    warn([*(ref.warning for ref in now.damaged), *preference.pins.problems])
    if not (now.experts or now.damaged):
        note("no experts yet; `expertctl install REF`, or `expertctl install FILE`, brings one")
    emit(_document(now, preference, flagged), _text(now, preference, flagged), as_json=as_json)


def _document(now: Scan, preference: Preference, flagged: Flagged) -> dict[str, object]:
    damaged = [{"ref": d.name, "path": str(d.path), "problem": d.problem} for d in now.damaged]
    used = preference.used(now.experts)
    experts = [
        {
            **expert_document(expert, preference.signers, flagged),
            "flags": _flags(expert, preference, flagged),
            "used": used.get(expert.package) == expert,
            "yanked": preference.yank_reason(expert),
        }
        for expert in now.experts
    ]
    return {"experts": experts, "damaged": damaged}


def expert_document(expert: StoredExpert, signers: Signers, flagged: Flagged) -> dict[str, object]:
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
        "flags": flags_of(expert, signers, flagged),
        "suspicions": flag_documents(flagged.get(expert.content_digest, ())),
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "warnings": list(expert.warnings),
    }


def flags_of(expert: StoredExpert, signers: Signers, flagged: Flagged) -> list[str]:
    """Return what is unusual about an installed expert, one word for each fact."""
    flags = {
        "unsigned": expert.signer is None,
        "revoked": signers.has_revoked(expert),
        "mismatch": expert.mismatched,
        "suspicious": expert.content_digest in flagged,
    }
    return [name for name, holds in flags.items() if holds]


def _flags(expert: StoredExpert, preference: Preference, flagged: Flagged) -> list[str]:
    """Return the same, and whether it was yanked or is named exactly."""
    yanked = ["yanked"] if preference.yank_reason(expert) is not None else []
    pinned = ["pinned"] if preference.pin(expert) is not None else []
    return [*flags_of(expert, preference.signers, flagged), *yanked, *pinned]


def _shown_flags(
    expert: StoredExpert, used: StoredExpert | None, preference: Preference, flagged: Flagged
) -> str:
    """Return the flags of an expert, and ``unused`` where another version is meant by its name."""
    unused = ["unused"] if used != expert else []
    return " ".join([*_flags(expert, preference, flagged), *unused])


def _shown_registry(expert: StoredExpert) -> str:
    return "(file)" if expert.registry == LOCAL else expert.registry


def _text(now: Scan, preference: Preference, flagged: Flagged) -> str:
    used = preference.used(now.experts)
    rows = [
        [
            str(expert.package),
            str(expert.version),
            _shown_registry(expert),
            expert.base.name,
            human_size(expert.size),
            preference.signers.shown(expert.signer),
            _shown_flags(expert, used.get(expert.package), preference, flagged),
        ]
        for expert in now.experts
    ]
    return (
        table(["NAME", "VERSION", "REGISTRY", "BASE", "SIZE", "SIGNER", "FLAGS"], rows)
        if rows
        else ""
    )
