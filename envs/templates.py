"""Jinja chat templates, rendered within bounds: they come with a model, so a stranger may have written them.

    template = Template(source, {"bos_token": "<s>"}, created)
    text = template.render(messages, tools, answer=True)

Three fences. The sandbox of jinja2 keeps a template from Python's insides. Of filters, tests, methods and
functions there are only those below: none is random, none reads a clock or prints an address. And every
loop, call and output goes through a meter, so a template ends soon and its text stays small. [CHT-6]
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import BadChat
from .template_functions import FILTERS, METHODS, TESTS, Meter, Names, TemplateRefused, dictionary, strftime

MAX_SOURCE: Final = 1 << 17
"""Characters of a template: the longest of well-known models have 20,000."""

_NODES: Final = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Macro, nodes.CallBlock),
    *(nodes.FilterBlock, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue),
    *(nodes.With, nodes.Scope, nodes.Expr, nodes.Helper),
)
"""What a template may consist of: nothing that loads another one."""


class Template:
    """One compiled template; safe to use from several threads.

    `tokens`: the names under which it sees control tokens. `created`: ms since 1970, the only clock that it
    sees. Raises BadChat where it cannot be compiled.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], created: int) -> None:
        if len(source) > MAX_SOURCE:
            raise BadChat(
                f"The chat template has {len(source)} characters, more than {MAX_SOURCE}: take another model."
            )
        self._sandbox = _Sandbox(created)
        self._tokens = dict(tokens)
        self._lock = threading.Lock()
        try:
            tree = self._sandbox.parse(source)
            _check_nodes(tree)
            code = self._sandbox.compile(_Metering().visit(tree))
            self._compiled = jinja2.Template.from_code(self._sandbox, code, self._sandbox.globals)
        except Exception as error:  # jinja2 and the compiler raise many kinds, all about the text
            raise BadChat(f"The chat template cannot be used: {told(error)}. Take another model.") from error

    def render(
        self, messages: list[dict[str, object]], tools: list[dict[str, object]] | None, answer: bool
    ) -> str:
        """The text; with `answer`, up to where the next answer begins. Raises TemplateRefused: the template
        itself refuses such messages, fails on them, or goes out of bounds."""
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": answer}
        with self._lock:
            self._sandbox.meter = Meter()
            try:
                return self._compiled.render(**self._tokens, **given)
            except TemplateRefused:
                raise
            except Exception as error:  # whatever a stranger's code does
                raise TemplateRefused(told(error)) from error


def told(error: BaseException) -> str:
    """An error's kind and text, without the stops at its end."""
    if isinstance(error, TemplateRefused):
        return str(error).rstrip(".: ")
    return f"{type(error).__name__}: {error}"[:400].rstrip(".: ")


class _Generation(Extension):
    """`{% generation %}` marks what a model writes; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Where a template runs. `meter` is that of the render in progress."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, created: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            cache_size=0,
            optimized=False,  # folding constants would run them before the meter does
        )
        self.meter = Meter()
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self.globals = {
            "range": self._range,
            "namespace": Names,
            "dict": dictionary,
            "raise_exception": _raise,
            "strftime_now": lambda form: strftime(form, created),
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        return not callable(value) or any(
            isinstance(obj, kind) and attr in allowed for kind, allowed in METHODS
        )

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if owner is self:  # put there by _Metering
            return called(*args)
        self.meter.step(1)
        if isinstance(owner, str):
            if called.__name__ == "join":
                args = (self.meter.counted(args[0]),)
            self.meter.check_growth(owner, called.__name__, args)
        return self.meter.sized(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is not among METHODS."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.check_operands(operator, left, right)
        return self.meter.sized(super().call_binop(context, operator, left, right))

    def counted(self, values: Any) -> list[Any]:
        return self.meter.counted(values)

    def emitted(self, *parts: Any) -> str:
        return self.meter.emitted(parts)

    def filtered(self, value: Any) -> Any:
        return self.meter.sized(value)

    def compared(self, value: Any) -> Any:
        self.meter.weigh(value)
        return value

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        self.meter.step(len(made))
        return made


class _Metering(NodeTransformer):
    """Puts the meter between a template and everything that takes time or room."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.recursive:
            raise TemplateRefused("it has a recursive loop")
        self.generic_visit(node)
        node.iter = _asked("counted", [node.iter])
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts: list[nodes.Expr] = [
            nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part for part in node.nodes
        ]
        node.nodes = [_asked("emitted", parts)]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _asked("emitted", node.nodes)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.node is None else _asked("filtered", [node])  # None: of a filter block

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _asked("compared", [node.expr])
        for operand in node.ops:
            operand.expr = _asked("compared", [operand.expr])
        return node


def _asked(name: str, values: Sequence[nodes.Node]) -> nodes.Expr:
    """A call of the sandbox's method of this name."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(values), [], None, None)


def _check_nodes(tree: nodes.Node) -> None:
    for node in tree.iter_child_nodes():
        if not isinstance(node, _NODES) or isinstance(node, (nodes.Block, nodes.Import)):
            raise TemplateRefused(f"it has a part of kind {type(node).__name__.lower()}")
        _check_nodes(node)


def _raise(message: object = "") -> None:
    raise TemplateRefused(str(message)[:400].rstrip(".: "))
