"""Small index documents and the keys that tests sign them with."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from expertctl.reference import Digest, PackageName, Version
from expertctl.registry.index_document import (
    IndexDocument,
    KeyEntry,
    Release,
    RevokedKey,
    SignedForm,
)
from expertctl.schema.manifest import BaseRequirement
from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey

SQL = PackageName("acme", "sql")
HOST = "127.0.0.1:8080"
TIME = "2026-01-02T03:04:05Z"
BASE = BaseRequirement("tiny", str(Digest.compute(b"arch")), str(Digest.compute(b"tokenizer")))


@cache
def make_named_key(name: str) -> PrivateKey:
    """A key that is the same within a run."""
    return PrivateKey.generate("ed25519")


def compute_named_key_id(name: str) -> str:
    return make_named_key(name).public.key_id


def make_known_registry(
    host: str = HOST, *, index_key: str = "index", namespaces: Sequence[str] = ()
) -> KnownRegistry:
    return KnownRegistry(
        host, f"http://{host}", make_named_key(index_key).public, tuple(namespaces)
    )


def make_release(version: str = "1.0.0", *signers: str, content: str = "") -> Release:
    """A version with one signed form for each signer, the newest last."""
    forms = [
        SignedForm(
            Digest.compute(f"{version} {content} {name}".encode()), compute_named_key_id(name), 1234
        )
        for name in signers or ("alice",)
    ]
    return Release(
        version=Version.parse(version),
        content_digest=Digest.compute(f"content of {version} {content}".encode()),
        forms=tuple(forms),
        size=5678,
        published=TIME,
        yanked=None,
        kinds=("lora",),
        base=BASE,
    )


def make_key_entry(
    name: str, *, endorsed_by: str | None = None, namespace: str = "acme"
) -> KeyEntry:
    """A publisher key, with the word of another where one is given."""
    new = make_named_key(name).public
    said = (
        None
        if endorsed_by is None
        else sign_key_statement(namespace=namespace, new=new, by=make_named_key(endorsed_by))
    )
    return KeyEntry(new, said)


def make_index_document(
    revision: int = 1,
    *,
    releases: Sequence[Release] | None = None,
    keys: Sequence[KeyEntry] = (),
    revoked: Sequence[str] = (),
    package: PackageName = SQL,
) -> IndexDocument:
    return IndexDocument(
        package=package,
        revision=revision,
        updated=TIME,
        description="Writes SQL",
        releases=tuple([make_release()] if releases is None else releases),
        keys=tuple(keys or [make_key_entry("alice")]),
        revoked=tuple(
            RevokedKey(compute_named_key_id(name), f"{name} was lost") for name in revoked
        ),
    )


def replace_keys(document: IndexDocument, *keys: KeyEntry) -> IndexDocument:
    return replace(document, keys=tuple(keys))
