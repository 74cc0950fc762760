"""Bodies of requests, as the published API has them."""

import json
from typing import Any

WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def body_of(**fields: Any) -> bytes:
    """A request that says little, and these fields; one of None is left out."""
    usual: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    given = {name: value for name, value in {**usual, **fields}.items() if value is not None}
    return json.dumps(given).encode()
