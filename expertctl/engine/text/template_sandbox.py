"""The Jinja sandbox for untrusted chat templates: no access to Python, bounded time and memory.

On top of Jinja's immutable sandbox, which keeps templates away from Python, everything whose cost
grows with its input is charged: loops, calls, filters, operators, comparisons, slices, output.
Where Jinja has no hook for a construct, its syntax tree is wrapped in a charging filter. Filters,
tests, functions and methods are on an allow-list. For an ordinary template the output is that of
transformers.
"""

from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from expertctl.engine.text.template_budget import (
    charge,
    charge_arguments,
    charge_call,
    charge_call_only,
    charge_iteration,
    charge_value,
    check_operator,
    concatenate_output,
    indent_filter,
    join_filter,
    limited_dict,
    limited_range,
    refuse_format,
    replace_filter,
    safe_method,
    split_words,
    stringify_output,
    tojson_filter,
    trim_filter,
)

_FILTERS = split_words(
    "abs capitalize dictsort float groupby int items list lower map max min reject rejectattr "
    "reverse select selectattr sort string title unique upper"
)
_CHEAP_FILTERS = split_words("count d default first last length")
_TESTS = split_words(
    "boolean callable defined divisibleby eq equalto == even false float ge > >= gt greaterthan "
    "integer iterable le < <= lessthan lower lt mapping ne != none number odd sameas sequence "
    "string true undefined upper"
)
_OWN_FILTERS: Mapping[str, Callable[..., Any]] = {
    "_counted": charge_iteration,
    "_weighed": charge_value,
    "indent": charge_arguments(indent_filter),
    "join": charge_arguments(join_filter),
    "replace": charge_arguments(replace_filter),
    "safe": charge_arguments(str),
    "tojson": charge_arguments(tojson_filter),
    "trim": charge_arguments(trim_filter),
}


class TemplateNamespace(Namespace):
    """``namespace()`` without private names, which never prints its content."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        """Set attributes as ``namespace(name=value)`` gives them, including ``self``."""
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one attribute."""
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Return no content, because namespaces may contain each other."""
        return "<Namespace>"


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the settings of transformers."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Provide ``functions`` in addition to ``range``, ``dict`` and ``namespace``."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationExtension, loopcontrols],
            finalize=stringify_output,
            cache_size=0,
        )
        known = self.filters
        self.filters = {
            **{name: charge_arguments(known[name]) for name in _FILTERS},
            **{name: charge_call_only(known[name]) for name in _CHEAP_FILTERS},
            **_OWN_FILTERS,
        }
        self.tests = {name: self.tests[name] for name in _TESTS}
        self.globals = {
            "range": limited_range,
            "dict": limited_dict,
            "namespace": TemplateNamespace,
            **functions,
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join output up to the maximum size."""
        return concatenate_output(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator if the result has an acceptable size."""
        check_operator(operator, left, right)
        return charge_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja, to avoid keyword clashes
        """Call a function that is on the allow-list."""
        owner = getattr(__obj, "__self__", None)
        charge_call(owner, *args, *kwargs.values())
        if isinstance(__obj, BuiltinFunctionType):
            __obj = safe_method(__obj, args)
        elif isinstance(__obj, type) and __obj is not TemplateNamespace:
            raise SecurityError(f"{__obj.__name__} is not available in chat templates")
        elif isinstance(__obj, MethodType) and isinstance(owner, str):
            raise SecurityError("escaped text has no methods in chat templates")
        result = super().call(__context, __obj, *args, **kwargs)
        charge(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace ``str.format`` by a refusal."""
        return refuse_format if super().wrap_str_format(value) is not None else None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _MeteringTransformer().visit(tree)
        return tree


class _GenerationExtension(Extension):
    """``{% generation %}``, which marks assistant output; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _MeteringTransformer(NodeTransformer):
    """Wraps constructs for which Jinja has no hook in charging filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's naming
        if node.recursive:
            raise SecurityError("recursive loops are not available in chat templates")
        self.generic_visit(node)
        node.iter = _wrap_filter(node.iter, "_counted")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.expr = _wrap_filter(node.expr, "_weighed")
        for operand in node.ops:
            operand.expr = _wrap_filter(operand.expr, "_weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _wrap_filter(node.node, "_weighed")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _wrap_filter(items, "join")

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _wrap_filter(node, "_weighed")

    visit_Dict = visit_List  # noqa: N815 - Jinja's naming

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _wrap_filter(node, "_weighed") if node.ctx == "load" else node


def _wrap_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(
        node, name, [], [], None, None, lineno=node.lineno, environment=node.environment
    )


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name[:40]!r}")
