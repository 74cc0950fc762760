"""Small pieces that OCI tests push: blobs, images, indexes."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
from starlette.testclient import TestClient

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

Fields = dict[str, Any]


def compute_digest(data: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def random_bytes(size: int, seed: str = "") -> bytes:
    """Bytes that are the same each time, and hardly compress."""
    return hashlib.shake_128(f"{seed}{size}".encode()).digest(size)


def iterate_chunks(data: bytes, size: int) -> Iterator[bytes]:
    """A body without a length."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def push_blob(client: TestClient, repository: str, data: bytes, algorithm: str = "sha256") -> str:
    """Push a blob in one request and return its digest."""
    digest = compute_digest(data, algorithm)
    answer = client.post(f"/v2/{repository}/blobs/uploads/?digest={digest}", content=data)
    assert answer.status_code == 201, answer.text
    return digest


def begin_upload(client: TestClient, repository: str) -> str:
    """Begin an upload and return its address."""
    answer = client.post(f"/v2/{repository}/blobs/uploads/")
    assert answer.status_code == 202, answer.text
    return str(answer.headers["Location"])


def make_descriptor(digest: str, size: int, media_type: str = LAYER, **more: object) -> Fields:
    return {"mediaType": media_type, "digest": digest, "size": size, **more}


def make_image(config: str, layers: Sequence[Fields] = (), **more: object) -> Fields:
    """A manifest whose config has two bytes."""
    return {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "config": make_descriptor(config, 2, CONFIG),
        "layers": list(layers),
        **more,
    }


def make_image_index(manifests: Sequence[Fields] = (), **more: object) -> Fields:
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests), **more}


def encode_json(document: Fields) -> bytes:
    return json.dumps(document).encode()


def put_manifest(
    client: TestClient,
    repository: str,
    reference: str,
    document: Fields | bytes,
    media_type: str | None = None,
) -> httpx2.Response:
    """PUT a manifest under its own media type, or another one."""
    content = document if isinstance(document, bytes) else encode_json(document)
    own = document.get("mediaType", IMAGE) if isinstance(document, dict) else IMAGE
    headers = {"Content-Type": media_type or own}
    return client.put(f"/v2/{repository}/manifests/{reference}", content=content, headers=headers)


def push_image(client: TestClient, repository: str, tag: str, **more: object) -> str:
    """Push a manifest with an empty config and return its digest."""
    config = push_blob(client, repository, b"{}")
    answer = put_manifest(client, repository, tag, make_image(config, **more))
    assert answer.status_code == 201, answer.text
    return str(answer.headers["Docker-Content-Digest"])


def read_error_code(answer: httpx2.Response) -> str:
    """The one OCI error code of an answer."""
    [error] = answer.json()["errors"]
    assert set(error) == {"code", "message", "detail"}
    return str(error["code"])
