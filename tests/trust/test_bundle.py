"""``model.sig``: golden bundles, and the attacks on the envelope, the key and the file set."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError, SignatureError
from expertctl.reference import Digest, FileDigest, hash_file
from expertctl.trust.bundle import MAX_BUNDLE, read_bundle, sign_files, verify_bundle
from expertctl.trust.dsse import encode_pae
from expertctl.trust.keys import ALGORITHMS, Algorithm, PrivateKey, PublicKey
from tests.trust.forged_bundles import (
    CONTENT,
    P256_ORDER,
    Document,
    Edit,
    encode_canonical,
    forge_bundle,
    forge_signature,
    forge_statement,
    hash_content,
    make_envelope,
    make_rfc_key,
    make_statement,
    removing,
    setting,
)

VECTORS = Path(__file__).parent / "vectors"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def model_files(folder: Path = VECTORS / "model") -> list[FileDigest]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [FileDigest(path.relative_to(folder).as_posix(), *hash_file(path)) for path in paths]


def verify(data: bytes, files: list[FileDigest] | None = None) -> None:
    verify_bundle(
        read_bundle(data), hash_content() if files is None else files, make_rfc_key().public
    )


def tool_key() -> PublicKey:
    return PublicKey.from_pem((VECTORS / "public.pem").read_bytes())


def test_a_bundle_of_the_public_tool_is_accepted() -> None:
    bundle = read_bundle((VECTORS / "tool-low-s.sig").read_bytes())
    assert bundle.name == "model"
    assert bundle.key_id == tool_key().key_id
    assert [file.path for file in bundle.files][-2:] == ["sub/notes.txt", "sub-notes.txt"]
    verify_bundle(bundle, model_files(), tool_key())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tool-shards.sig", "'shards', not 'files'"),
        ("tool-blake2.sig", "'blake2b', not 'sha256'"),
        ("tool-symlinks.sig", "allow_symlinks"),
        ("tool-ignored-weights.sig", "leave 'adapter_model.safetensors' unsigned"),
    ],
)
def test_a_bundle_of_the_public_tool_that_says_less_is_refused(file: str, message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        read_bundle((VECTORS / file).read_bytes())


def test_a_bundle_of_the_public_tool_with_the_higher_s_is_refused() -> None:
    bundle = read_bundle((VECTORS / "tool-high-s.sig").read_bytes())
    with pytest.raises(SignatureError, match="higher s") as refused:
        verify_bundle(bundle, model_files(), tool_key())
    assert "expertctl sign" in refused.value.hint


def test_a_bundle_by_a_key_on_another_curve_is_refused_cleanly() -> None:
    bundle = read_bundle((VECTORS / "tool-p384.sig").read_bytes())
    with pytest.raises(SignatureError, match="names the key"):
        verify_bundle(bundle, model_files(), tool_key())
    with pytest.raises(InvalidPackageError, match="secp384r1"):
        PublicKey.from_pem((VECTORS / "public-p384.pem").read_bytes())


def test_our_bundle_is_the_same_bytes_on_every_machine() -> None:
    ours = sign_files(model_files(), name="acme/sql@1.0.0", key=make_rfc_key())
    assert ours == (VECTORS / "ours.sig").read_bytes()
    verify_bundle(read_bundle(ours), model_files(), make_rfc_key().public)


def test_our_bundle_is_the_one_by_hand() -> None:
    ours = json.loads(sign_files(hash_content(), name="acme/sql@1.0.0", key=make_rfc_key()))
    payload = base64.b64decode(ours["dsseEnvelope"]["payload"])
    assert json.loads(payload) == make_statement()
    assert ours == make_envelope(payload, make_rfc_key())


def test_a_bundle_by_hand_is_accepted() -> None:
    verify(forge_bundle(lambda _: None))
    verify(forge_statement(lambda _: None))


def test_the_signature_itself_may_be_among_the_files() -> None:
    data = forge_bundle(lambda _: None)
    verify(data, [*hash_content(), FileDigest("model.sig", len(data), Digest.compute(data))])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_kinds_of_key_sign_and_verify(algorithm: Algorithm) -> None:
    key = PrivateKey.generate(algorithm)
    data = sign_files(hash_content(), name="acme/sql@1.0.0", key=key)
    assert data == sign_files(list(reversed(hash_content())), name="acme/sql@1.0.0", key=key)
    verify_bundle(read_bundle(data), hash_content(), key.public)


def test_pae_is_that_of_the_dsse_specification() -> None:
    # DSSE v1.0.2, protocol.md: the example under "Test Vectors".
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert encode_pae("http://example.com/HelloWorld", b"hello world") == expected


def reencoded(change: Callable[[str], str]) -> Edit:
    def edit(document: Document) -> None:
        envelope = document["dsseEnvelope"]
        envelope["payload"] = change(envelope["payload"])

    return edit


ENVELOPE = "dsseEnvelope"
MATERIAL = "verificationMaterial"
SIGNATURE = (ENVELOPE, "signatures", 0)
HINT = (MATERIAL, "publicKey", "hint")
HOSTILE: dict[str, tuple[Edit, str]] = {
    # 26: the envelope
    "payload type changed": (
        setting(ENVELOPE, "payloadType", value="application/json"),
        "payloadType is 'application/json'",
    ),
    "payload type with parameters": (
        setting(ENVELOPE, "payloadType", value=PAYLOAD_TYPE + ";v=1"),
        "payloadType",
    ),
    "payload with the url alphabet": (
        reencoded(lambda text: text[:-4] + "-_-_"),
        "payload is not standard base64",
    ),
    "payload with whitespace": (reencoded(lambda text: text[:8] + " " + text[8:]), "base64"),
    "payload with a newline at its end": (reencoded(lambda text: text + "\n"), "base64"),
    "payload with more padding": (reencoded(lambda text: text + "===="), "base64"),
    "payload without padding": (reencoded(lambda text: text.rstrip("=") + "A"), "base64"),
    "payload with loose last bits": (
        setting(ENVELOPE, "payload", value="e31="),
        "base64|strict JSON",
    ),
    "payload not ascii": (reencoded(lambda text: "ä" + text[1:]), "base64"),
    "payload empty": (setting(ENVELOPE, "payload", value=""), "not strict JSON"),
    "payload missing": (removing(ENVELOPE, "payload"), "no 'payload'"),
    "payload is a number": (setting(ENVELOPE, "payload", value=7), "not a string"),
    "envelope missing": (removing(ENVELOPE), "no 'dsseEnvelope'"),
    "message signature instead": (setting("messageSignature", value={}), "'messageSignature'"),
    "media type of v0.2": (
        setting("mediaType", value="application/vnd.dev.sigstore.bundle+json;version=0.2"),
        "mediaType",
    ),
    "media type missing": (removing("mediaType"), "no 'mediaType'"),
    # 27: number of signatures
    "no signatures": (setting(ENVELOPE, "signatures", value=[]), "0 entries in the signatures"),
    "two signatures": (
        lambda d: d[ENVELOPE]["signatures"].append(d[ENVELOPE]["signatures"][0]),
        "2 entries in the signatures",
    ),
    "signatures is an object": (setting(ENVELOPE, "signatures", value={}), "not an array"),
    "signature empty": (setting(*SIGNATURE, "sig", value=""), "not in DER"),
    "signature not base64": (setting(*SIGNATURE, "sig", value="!!"), "base64"),
    "signature names another key": (setting(*SIGNATURE, "keyid", value="me"), "keyid"),
    "signature without keyid": (removing(*SIGNATURE, "keyid"), "no 'keyid'"),
    "signature with a certificate": (setting(*SIGNATURE, "cert", value=""), "unknown key 'cert'"),
    # 29: the hint
    "hint of another key": (setting(*HINT, value="ab" * 32), "names the key sha256:abab"),
    "hint missing": (removing(*HINT), "no 'hint'"),
    "hint null": (setting(*HINT, value=None), "not a string"),
    "hint empty": (setting(*HINT, value=""), "64 lower-case hex"),
    "hint upper case": (lambda d: setting(*HINT, value="AB" * 32)(d), "64 lower-case hex"),
    "hint with its algorithm": (setting(*HINT, value="sha256:" + "ab" * 32), "lower-case hex"),
    "raw bytes of a key": (
        setting(MATERIAL, "publicKey", value={"rawBytes": "AAAA", "keyDetails": 5}),
        "no 'hint'",
    ),
    "raw bytes beside the hint": (
        setting(MATERIAL, "publicKey", "rawBytes", value="AAAA"),
        "unknown key 'rawBytes'",
    ),
    # 42: other kinds of proof
    "certificate instead of a key": (
        setting(MATERIAL, value={"certificate": {"rawBytes": "AAAA"}, "tlogEntries": []}),
        "no 'publicKey'",
    ),
    "certificate beside the key": (setting(MATERIAL, "certificate", value={}), "'certificate'"),
    "timestamps": (setting(MATERIAL, "timestampVerificationData", value={}), "unknown key"),
    # 43: log entries prove nothing here
    "log entries": (setting(MATERIAL, "tlogEntries", value=[{"logIndex": "1"}]), "tlogEntries"),
    "log entries null": (setting(MATERIAL, "tlogEntries", value=None), "tlogEntries"),
    "log entries missing": (removing(MATERIAL, "tlogEntries"), "no 'tlogEntries'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_envelope_outside_the_strict_form_is_refused(name: str) -> None:
    edit, message = HOSTILE[name]
    with pytest.raises(SignatureError, match=message):
        verify(forge_bundle(edit))


def test_a_signature_over_a_shifted_encoding_is_refused() -> None:
    payload = json.dumps(make_statement()).encode()
    for signed in (
        payload,
        b"DSSEv1 28 " + PAYLOAD_TYPE.encode() + b" " + payload,
        b"DSSEV1 28 " + PAYLOAD_TYPE.encode() + b" %d " % len(payload) + repr(payload).encode(),
        b"DSSEv1 27 " + PAYLOAD_TYPE.encode() + b" %d " % len(payload) + payload,
    ):
        data = encode_canonical(make_envelope(payload, make_rfc_key(), signed=signed))
        with pytest.raises(SignatureError, match="is not one by key"):
            verify(data)


def test_the_signed_bytes_are_those_of_the_payload_not_of_their_meaning() -> None:
    document = make_envelope(json.dumps(make_statement()).encode(), make_rfc_key())
    other = json.dumps(make_statement(), indent=1).encode()
    document["dsseEnvelope"]["payload"] = base64.b64encode(other).decode()
    with pytest.raises(SignatureError, match="is not one by key"):
        verify(encode_canonical(document))


def raised(signature: bytes) -> bytes:
    r, s = decode_dss_signature(signature)
    return encode_dss_signature(r, P256_ORDER - s)


HOSTILE_SIGNATURES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "garbage": (lambda _: b"\x30garbage", "not in DER"),
    "trailing bytes": (lambda s: s + b"\0", "not in DER"),
    "truncated": (lambda s: s[:-1], "not in DER"),
    "the higher s": (raised, "higher s"),
    "r is zero": (lambda s: encode_dss_signature(0, decode_dss_signature(s)[1]), "outside 1"),
    "all zero": (lambda _: encode_dss_signature(0, 0), "outside 1"),
    "64 raw bytes": (lambda _: b"\x01" * 64, "not in DER"),
    "a megabyte": (lambda _: b"\x30" * (1 << 20), "not in DER"),
}


@pytest.mark.parametrize("name", HOSTILE_SIGNATURES)
def test_a_signature_in_another_encoding_is_refused(name: str) -> None:
    change, message = HOSTILE_SIGNATURES[name]
    with pytest.raises(SignatureError, match=message):
        verify(forge_signature(change))


def test_a_good_signature_by_another_key_is_refused_even_with_the_right_hint() -> None:
    hint = make_rfc_key().public.key_id.removeprefix("sha256:")
    for algorithm in ALGORITHMS:
        document = json.loads(
            sign_files(hash_content(), name="x", key=PrivateKey.generate(algorithm))
        )
        setting(*HINT, value=hint)(document)
        with pytest.raises(SignatureError, match=r"is not one by key|not in DER"):
            verify(encode_canonical(document))


def test_an_ed25519_key_where_an_ecdsa_key_signed_is_refused_cleanly() -> None:
    key = PrivateKey.generate("ed25519").public
    document = json.loads(forge_bundle(lambda _: None))
    setting(*HINT, value=key.key_id.removeprefix("sha256:"))(document)
    with pytest.raises(SignatureError, match="is not one by key"):
        verify_bundle(read_bundle(encode_canonical(document)), hash_content(), key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {**c, "payload.py": b""}, "not signed: 'payload.py'"),
        (lambda c: {**c, ".git/hooks/x": b""}, "not signed: '.git/hooks/x'"),
        (lambda c: {**c, ".gitattributes": b""}, "not signed: '.gitattributes'"),
        (lambda c: {**c, "sub/model.sig": b""}, "not signed: 'sub/model.sig'"),
        (lambda c: {k: v for k, v in c.items() if k != "README.md"}, "missing: 'README.md'"),
        (lambda c: {**c, "README.md": b"# sqL\n"}, "changed since it was signed: 'README.md'"),
        (
            lambda c: {**c, "README.md": c["expert.json"], "expert.json": c["README.md"]},
            "changed since it was signed: 'README.md', 'expert.json'",
        ),
        (
            lambda c: {("readme.md" if k == "README.md" else k): v for k, v in c.items()},
            "not signed: 'readme.md'; missing: 'README.md'",
        ),
        (
            lambda c: {k: v for k, v in c.items() if k != "README.md"} | {"README.md/x": b""},
            "not signed: 'README.md/x'; missing: 'README.md'",
        ),
        (lambda c: {**c, **{f"f{i}": b"" for i in range(7)}}, "'f4' and 2 more"),
        (lambda _: {}, "missing"),
    ],
)
def test_another_file_set_is_refused_by_name(
    change: Callable[[dict[str, bytes]], dict[str, bytes]], message: str
) -> None:
    with pytest.raises(SignatureError, match=message) as refused:
        verify(forge_bundle(lambda _: None), hash_content(change(dict(CONTENT))))
    assert refused.value.hint.startswith("get it again from its publisher")


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(SignatureError, match="two of them have one name"):
        verify(forge_bundle(lambda _: None), [*hash_content(), hash_content()[0]])


def test_a_signature_over_one_version_does_not_fit_another() -> None:
    one = sign_files(hash_content(), name="acme/sql@1.0.0", key=make_rfc_key())
    two = hash_content({**CONTENT, "expert.json": b'{"version":"2.0.0"}'})
    with pytest.raises(SignatureError, match=r"changed since it was signed: 'expert\.json'"):
        verify(one, two)


def signed_text() -> str:
    return forge_bundle(lambda _: None).decode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not strict JSON"),
        (b"null", "not a JSON object"),
        (b"\xef\xbb\xbf" + signed_text().encode(), "not strict JSON"),
        (signed_text().replace('"keyid":""', '"keyid":"","keyid":""').encode(), "duplicate key"),
        (signed_text().replace("[]", "9" * 999).encode(), "beyond"),
        (b'{"a":' * 1000, "not strict JSON|nested deeper"),
        (signed_text().replace("[]", "[" * 40 + "]" * 40).encode(), "nested deeper"),
        (b" " * (MAX_BUNDLE + 1), "at most"),
        (signed_text().encode() + b"\n", "not spelled"),
        (json.dumps(json.loads(signed_text())).encode(), "not spelled"),
        (json.dumps(json.loads(signed_text()), separators=(",", ":"), sort_keys=True).encode(),
         "not spelled"),
        (signed_text().replace('"keyid"', '"key\\u0069d"').encode(), "not spelled"),
        (signed_text().encode("utf-16"), "not UTF-8"),
        (b"\x80\x04\x95", "not UTF-8"),
    ],
)  # fmt: skip
def test_json_in_another_spelling_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        read_bundle(data)


@settings(deadline=None, max_examples=300)
@given(position=st.integers(min_value=0), mask=st.integers(min_value=1, max_value=255))
def test_no_byte_of_a_bundle_can_be_changed(position: int, mask: int) -> None:
    data = bytearray(forge_bundle(lambda _: None))
    data[position % len(data)] ^= mask
    with pytest.raises(SignatureError):
        verify(bytes(data))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_no_bytes_make_reading_fail_in_another_way(data: bytes) -> None:
    with pytest.raises(SignatureError):
        read_bundle(data)


NAMES = st.text("abAB-_.é ", min_size=1, max_size=6).filter(lambda t: t.strip(".") != "")


@settings(deadline=None, max_examples=60)
@given(
    content=st.dictionaries(NAMES, st.binary(max_size=8), min_size=1, max_size=5),
    name=st.text("abc/@1.", min_size=1, max_size=20),
)
def test_what_was_signed_verifies_and_one_change_does_not(
    content: dict[str, bytes], name: str
) -> None:
    files = hash_content(content)
    try:
        data = sign_files(files, name=name, key=make_rfc_key())
    except SignatureError:
        folded = {path.casefold() for path in content}
        assert len(folded) < len(content)
        return
    verify(data, files)
    first = next(iter(content))
    for other in (
        {**content, first: content[first] + b"\0"},
        {**content, first + "x": b""},
        {path: value for path, value in content.items() if path != first},
    ):
        with pytest.raises(SignatureError, match="does not fit"):
            verify(data, hash_content(other))
