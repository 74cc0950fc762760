"""Adapters of any kind by the shapes of their tensors, right or wrong."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.adapter_config import AdapterConfig, parse_config
from expertctl.package.adapter_spec import adapter_spec
from expertctl.package.tensor_file import DTYPE_BYTES, TensorTable, parse_header
from tests.package.forge import table

Shapes = Mapping[str, Sequence[int]]


def config_of(document: Mapping[str, Any]) -> AdapterConfig:
    return parse_config(json.dumps(document).encode(), what="adapter_config.json")


def config_refused(document: Mapping[str, Any]) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        config_of(document)
    return caught.value.message


def table_of(
    shapes: Shapes, *, dtype: str = "F32", dtypes: Mapping[str, str] | None = None
) -> TensorTable:
    """The table of a file with these tensors; ``dtypes`` names those of another type."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype)
        size = math.prod(shape) * DTYPE_BYTES[kind]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    data = table(entries, bytes(at))
    return parse_header(data, file_size=len(data), what="w")


def spec_of(document: Mapping[str, Any], shapes: Shapes, **types: Any) -> AdapterSpec:
    return adapter_spec(config_of(document), table_of(shapes, **types), what="w")


def spec_refused(document: Mapping[str, Any], shapes: Shapes, **types: Any) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        spec_of(document, shapes, **types)
    return caught.value.message
