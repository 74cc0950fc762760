"""Small index documents and the keys that tests sign them with."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from expertctl.digest import Digest
from expertctl.reference import PackageName, Version
from expertctl.registry.index_document import (
    IndexDocument,
    KeyEntry,
    Release,
    RevokedKey,
    SignedForm,
)
from expertctl.registry.key_statement import sign_statement
from expertctl.schema.manifest import BaseRequirement
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PrivateKey

SQL = PackageName("acme", "sql")
HOST = "127.0.0.1:8080"
TIME = "2026-01-02T03:04:05Z"
BASE = BaseRequirement("tiny", str(Digest.of(b"arch")), str(Digest.of(b"tokenizer")))


@cache
def key(name: str) -> PrivateKey:
    """A key that is the same within a run."""
    return PrivateKey.generate("ed25519")


def key_id(name: str) -> str:
    return key(name).public.key_id


def known(
    host: str = HOST, *, index_key: str = "index", namespaces: Sequence[str] = ()
) -> KnownRegistry:
    return KnownRegistry(host, f"http://{host}", key(index_key).public, tuple(namespaces))


def release(version: str = "1.0.0", *signers: str, content: str = "") -> Release:
    """A version with one signed form for each signer, the newest last."""
    forms = [
        SignedForm(Digest.of(f"{version} {content} {name}".encode()), key_id(name), 1234)
        for name in signers or ("alice",)
    ]
    return Release(
        version=Version.parse(version),
        content_digest=Digest.of(f"content of {version} {content}".encode()),
        forms=tuple(forms),
        size=5678,
        published=TIME,
        yanked=None,
        kinds=("lora",),
        base=BASE,
    )


def entry(name: str, *, by: str | None = None, namespace: str = "acme") -> KeyEntry:
    """A publisher key, with the word of another where one is given."""
    new = key(name).public
    said = None if by is None else sign_statement(namespace=namespace, new=new, by=key(by))
    return KeyEntry(new, said)


def index(
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
        releases=tuple([release()] if releases is None else releases),
        keys=tuple(keys or [entry("alice")]),
        revoked=tuple(RevokedKey(key_id(name), f"{name} was lost") for name in revoked),
    )


def with_keys(document: IndexDocument, *keys: KeyEntry) -> IndexDocument:
    return replace(document, keys=tuple(keys))
