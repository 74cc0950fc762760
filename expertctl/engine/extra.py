"""What the extra ``engine`` brings: without all of it nothing is generated, nor measured."""

from importlib.util import find_spec

ENGINE_MODULES = ("torch", "jinja2", "numba", "llvmlite")


def has_engine() -> bool:
    """Tell whether all of it is installed; imports nothing."""
    return all(find_spec(name) is not None for name in ENGINE_MODULES)
