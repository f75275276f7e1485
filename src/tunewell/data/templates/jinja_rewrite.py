"""Write the meter's checks into a parsed template, before it becomes code.

A check is a filter whose name no template can spell, such as `(spend)`, given the context so that the compiler does
not work it out beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

from tunewell.data.templates.jinja_limits import TemplateFailed

_TEXT_FILTERS = frozenset(
    ("(concat)", "capitalize", "center", "indent", "join", "lower", "replace", "string", "title", "tojson", "trim")
)


def rewrite(template: nodes.Template, environment: Environment) -> nodes.Template:
    """Give the template with a check at every place where it could become large or slow."""
    return _Rewriter(environment).visit(template)


class _Rewriter(NodeTransformer):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def _checked(self, check: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(node, check, list(args), [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made

    def _with_price(self, body: list[nodes.Node], line: int) -> list[nodes.Node]:
        price = nodes.Const(_price(body), lineno=line)
        return [nodes.ExprStmt(self._checked("(spend)", nodes.Const(None, lineno=line), price), lineno=line), *body]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body = self._with_price(node.body, node.lineno)
        self.generic_visit(node)
        test: Any = node.test
        if test is not None:
            node.test = self._checked("(spend)", test, nodes.Const(16, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        node.body = self._with_price(node.body, node.lineno)
        return self.generic_visit(node)

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.Const) or _is_text(child) else self._checked("(printable)", child)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._checked("(concat)", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._checked("(keep)", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._checked("(flat)", node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        is_cheap = len(node.ops) == 1 and _is_cheap(node.expr, node.ops[0])
        for operand in node.ops:
            if operand.op in ("in", "notin") and not _is_listed(operand.expr):
                operand.expr = self._checked("(searched)" if is_cheap else "(within)", operand.expr)
            elif not is_cheap and not isinstance(operand.expr, nodes.Const):
                operand.expr = self._checked("(flat)", operand.expr)
        if not is_cheap and not isinstance(node.expr, nodes.Const):
            node.expr = self._checked("(flat)", node.expr)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateFailed("`{% autoescape %}` is not available in chat templates")


def _price(body: Sequence[nodes.Node]) -> int:
    """Say what one pass through a body costs at least: 2 per node, and in bytes what its literals make."""
    total = 16
    for statement in body:
        for node in (statement, *statement.find_all(nodes.Node)):
            total += 2
            if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
                total += 64 + 16 * len(node.items)
            elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.For):
                total += 512
            elif isinstance(node, nodes.Output):
                total += 16
    return total


def _is_text(node: nodes.Node) -> bool:
    """Say whether an expression can only give text: then there is nothing to unfold when it is printed."""
    match node:
        case nodes.TemplateData():
            return True
        case nodes.Const():
            return isinstance(node.value, str)
        case nodes.Add():
            return _is_text(node.left) or _is_text(node.right)
        case nodes.Filter():
            return node.name in _TEXT_FILTERS
        case nodes.CondExpr():
            return node.expr2 is not None and _is_text(node.expr1) and _is_text(node.expr2)
    return False


def _is_cheap(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Say whether a comparison takes no time whatever the values are: one side is a constant."""
    right: Any = operand.expr
    if operand.op in ("in", "notin"):
        return isinstance(left, nodes.Const) or _is_listed(right)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const | nodes.Compare | nodes.Not | nodes.Test)


def _is_listed(node: nodes.Expr) -> bool:
    """Say whether an expression is a constant, or a list of constants written out."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)
