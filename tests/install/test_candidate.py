"""Which signed form of a version is installed."""

import pytest

from expertctl.install.candidate import SignerVerdict, candidates_from_index
from expertctl.registry.index_document import Release, SignedForm
from tests.registry.indexes import (
    HOST,
    compute_named_key_id,
    make_index_document,
    make_release,
)


@pytest.mark.parametrize(
    ("verdicts", "order"),
    [
        ({}, ["carol", "bob", "alice"]),
        ({"carol": "unknown"}, ["bob", "alice", "carol"]),
        ({"carol": "revoked", "bob": "unknown"}, ["alice", "carol", "bob"]),
        ({"alice": "unknown", "bob": "unknown", "carol": "revoked"}, ["carol", "bob", "alice"]),
    ],
)
def test_trusted_forms_come_first_and_of_those_the_newest(
    verdicts: dict[str, SignerVerdict], order: list[str]
) -> None:
    names = ("alice", "bob", "carol")
    ids = {compute_named_key_id(name): name for name in names}
    release = make_release("1.0.0", *names)

    def judge(_: Release, form: SignedForm) -> SignerVerdict:
        return verdicts.get(ids[form.signer], "trusted")

    [candidate] = candidates_from_index(make_index_document(releases=[release]), HOST, judge)
    signers = {form.package_digest: ids[form.signer] for form in release.forms}
    assert [signers[digest] for digest in candidate.package_digests] == order
    assert signers[candidate.package_digest] == order[0]
