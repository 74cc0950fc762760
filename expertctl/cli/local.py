"""``expertctl list``: what is installed. Imports none of the libraries of other commands."""

from expertctl.cli.output import JsonFlag, emit, human_size, note, table, warn
from expertctl.settings import load_settings
from expertctl.store.flags import Flagged, flag_documents, read_flagged
from expertctl.store.paths import Scan
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.signers import Signers, read_signers
from expertctl.store.store import Store


def list_(as_json: JsonFlag = False) -> None:
    """List the installed experts.

    Example: expertctl list --json
    """
    home = load_settings().home
    now, signers = Store(home.store).scan(), read_signers(home.trust)
    flagged = read_flagged(home.flagged)
    warn(ref.warning for ref in now.damaged)
    if not (now.experts or now.damaged):
        note("no experts yet; `expertctl install REF`, or `expertctl install FILE`, brings one")
    emit(_document(now, signers, flagged), _text(now, signers, flagged), as_json=as_json)


def _document(now: Scan, signers: Signers, flagged: Flagged) -> dict[str, object]:
    damaged = [{"ref": d.name, "path": str(d.path), "problem": d.problem} for d in now.damaged]
    experts = [expert_document(expert, signers, flagged) for expert in now.experts]
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


def _shown_registry(expert: StoredExpert) -> str:
    return "(file)" if expert.registry == LOCAL else expert.registry


def _text(now: Scan, signers: Signers, flagged: Flagged) -> str:
    rows = [
        [
            str(expert.package),
            str(expert.version),
            _shown_registry(expert),
            expert.base.name,
            human_size(expert.size),
            signers.shown(expert.signer),
            " ".join(flags_of(expert, signers, flagged)),
        ]
        for expert in now.experts
    ]
    return (
        table(["NAME", "VERSION", "REGISTRY", "BASE", "SIZE", "SIGNER", "FLAGS"], rows)
        if rows
        else ""
    )
