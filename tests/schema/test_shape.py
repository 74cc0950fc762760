"""Shapes are made by many threads at once, first uses too."""

import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest

from expertctl.schema.validation import convert_document, decode_json

CROWD = """
import sys, threading
import msgspec
from expertctl.schema.validation import convert_document, decode_json

def use(kind, start):
    start.wait()
    convert_document({"one": {"number": 1}, "many": [{"text": "x"}]}, kind)
    decode_json('{"one": {}, "many": []}', kind)

sys.setswitchinterval(1e-6)
for _ in range(200):
    part = msgspec.defstruct("Part", [("number", int, 0), ("text", str, "")])
    kind = msgspec.defstruct("Kind", [("one", part), ("many", list[part])])
    start = threading.Barrier(4)
    crowd = [threading.Thread(target=use, args=(kind, start)) for _ in range(4)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join()
"""


@dataclass(frozen=True)
class Thing:
    name: str
    size: int = 0


def test_a_document_becomes_a_value() -> None:
    assert convert_document({"name": "a", "size": 3}, Thing) == Thing("a", 3)
    assert convert_document({"name": "a", "size": "3"}, Thing, strict=False) == Thing("a", 3)
    assert decode_json(b'{"name": "a"}', Thing) == Thing("a")


@pytest.mark.parametrize("document", [{}, {"name": 1}, {"name": "a", "size": "3"}, []])
def test_another_shape_is_refused(document: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        convert_document(document, Thing)


def test_many_threads_use_a_class_for_the_first_time() -> None:
    """It needs a process of its own: what goes wrong ends it."""
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
