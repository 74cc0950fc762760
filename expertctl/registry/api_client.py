"""``/api/v1`` of our own registry: JSON there and back."""

from collections.abc import Mapping
from dataclasses import dataclass

from expertctl.errors import InvalidPackageError, RegistryError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import Answer, Call, Http
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, load_object

ROOT = "/api/v1/"
MAX_ANSWER = 16 << 20
_GOOD = frozenset({200, 201, 202, 204})


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Asks one registry; paths are those below ``/api/v1/``.

    Every method raises what the answer means: `NotFoundError`, `ForbiddenError`, `ConflictError`,
    `RegistryError` where it is not understood.
    """

    http: Http
    address: RegistryAddress

    def get(self, path: str) -> JsonObject:
        """Ask for something."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Make something; sent again only when it cannot have arrived."""
        return self._ask("POST", path, body)

    def put(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Set something."""
        return self._ask("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, JsonValue]) -> JsonObject:
        """Change something."""
        return self._ask("PATCH", path, body)

    def delete(self, path: str, body: Mapping[str, JsonValue] | None = None) -> JsonObject:
        """Remove something."""
        return self._ask("DELETE", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, JsonValue] | None) -> JsonObject:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else canonical(dict(body))
        call = Call(method, self.address, ROOT + path.lstrip("/"), headers=headers, body=data)
        answer = self.http.request(call, max_bytes=MAX_ANSWER, accept=_GOOD)
        return {} if not answer.body else self._object(answer, call)

    def _object(self, answer: Answer, call: Call) -> JsonObject:
        try:
            return load_object(answer.body, what=call.what, max_bytes=MAX_ANSWER)
        except InvalidPackageError as error:
            raise RegistryError(
                f"{self.address.host}: {call.what}: the answer is not JSON of ours",
                hint="is that the address of an expertctl registry?",
            ) from error
