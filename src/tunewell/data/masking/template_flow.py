"""Read a template's syntax tree to prove that it can do nothing with words but put them out, as they are or trimmed.

Where that is proven, conversations of one shape differ in nothing but their words: one rendering stands for all.
Every expression gets a kind:

    shape      depends on roles, number of turns, tools, special tokens: the same for all rows of a shape
    words      a message's own words            may be put out, joined with text, tested for being there, trimmed
    trimmed    the same after trimming          likewise, but for a second trim
    text       words joined with other text     likewise
    message    one message                      may be asked for its fields
    messages   a list of them                   may be counted, cut and looped over
    either     one of several kinds             may be tested for being there

Anything else that is done with other kinds than `shape` ends the proof, and each row is rendered on its own.
"""

from collections.abc import Callable
from datetime import datetime

from jinja2 import nodes

from tunewell.data.masking.placeholders import REASONING
from tunewell.data.templates.jinja_sandbox import Sandbox

Kind = str

_TEXTS = frozenset(("words", "trimmed", "text"))
_KNOWN = frozenset(("shape", "message", "messages", "either")) | _TEXTS
_TYPE_TESTS = frozenset(
    ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean")
)
_LOOP_COUNTS = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length"))
_STRIPS = frozenset(("strip", "lstrip", "rstrip"))


class _Unproven(Exception):
    pass


def only_puts_words_out(source: str) -> bool:
    """Whether no row's words can change anything in the rendering of a template but themselves."""
    tree = Sandbox(datetime(2025, 1, 1)).parse(source)
    flow = _Flow()
    try:
        before = None
        while before != flow.variables:
            before = dict(flow.variables)
            flow.run(tree.body)
    except _Unproven:
        return False
    return True


class _Flow:
    """The kinds of variables, whatever way the template takes: they only ever widen."""

    def __init__(self) -> None:
        self.variables: dict[str, Kind] = {"messages": "messages", "loop": "loop"}

    def run(self, body: list[nodes.Node]) -> None:
        for node in body:
            if isinstance(node, nodes.Output):
                for part in node.nodes:
                    self._need(part, _TEXTS | {"shape"})
            elif isinstance(node, nodes.If):
                self._need(node.test, _KNOWN)
                self.run(node.body if self._is_always(node.test) else [*node.body, *node.elif_, *node.else_])
            elif isinstance(node, nodes.For):
                self._loop(node)
            elif isinstance(node, nodes.Assign):
                self._assign(node.target, self.kind(node.node))
            elif type(node).__name__ not in ("Break", "Continue"):
                raise _Unproven

    def _is_always(self, test: nodes.Node) -> bool:
        """Words are always strings; what a template does with other content need not be followed."""
        return isinstance(test, nodes.Test) and test.name == "string" and self.kind(test.node) == "words"

    def _loop(self, node: nodes.For) -> None:
        over = self.kind(node.iter)
        if node.recursive or over not in ("shape", "messages"):
            raise _Unproven
        self._assign(node.target, "message" if over == "messages" else "shape")
        if node.test is not None:
            self._need(node.test, _KNOWN)
        self.run([*node.body, *node.else_])

    def _assign(self, target: nodes.Node, kind: Kind) -> None:
        if isinstance(target, nodes.Name) and target.name != "loop":
            known = self.variables.get(target.name, kind)
            self.variables[target.name] = _wider(known, kind)
        elif isinstance(target, nodes.Tuple) and kind == "shape":
            for inner in target.items:
                self._assign(inner, "shape")
        elif not (isinstance(target, nodes.NSRef) and kind == "shape"):
            raise _Unproven

    def _need(self, node: nodes.Node, kinds: frozenset[str]) -> Kind:
        kind = self.kind(node)
        if kind not in kinds:
            raise _Unproven
        return kind

    def kind(self, node: nodes.Node) -> Kind:
        """Tell the kind of an expression."""
        if isinstance(node, nodes.TemplateData | nodes.Const):
            return "shape"
        if isinstance(node, nodes.Name):
            return self.variables.get(node.name, "shape")
        rule = _RULES.get(type(node))
        kind = rule(self, node) if rule else None
        if kind is not None:
            return kind
        for inner in node.iter_child_nodes():
            self._need(inner, frozenset(("shape",)))
        return "shape"

    def _joined(self, node: nodes.Add | nodes.Concat) -> Kind | None:
        parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
        kinds = {self._need(part, _TEXTS | {"shape"}) for part in parts}
        return "text" if kinds & _TEXTS else None

    def _either(self, node: nodes.Or | nodes.And) -> Kind:
        left, right = self._need(node.left, _KNOWN), self._need(node.right, _KNOWN)
        try:
            return _wider(left, right)
        except _Unproven:
            return "either"

    def _chosen(self, node: nodes.CondExpr) -> Kind:
        self._need(node.test, _KNOWN)
        kinds = [self._need(choice, _KNOWN) for choice in (node.expr1, node.expr2) if choice is not None]
        return _wider(kinds[0], kinds[-1])

    def _denied(self, node: nodes.Not) -> Kind:
        self._need(node.node, _KNOWN)
        return "shape"

    def _field(self, node: nodes.Getattr | nodes.Getitem) -> Kind | None:
        of = self.kind(node.node)
        name = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
        if of == "loop" and name in _LOOP_COUNTS:
            return "shape"
        if of == "message" and isinstance(name, str) and not hasattr(dict, name):
            return "words" if name == "content" or name in REASONING else "shape"
        if of == "messages" and isinstance(node, nodes.Getitem) and self._need(node.arg, frozenset(("shape",))):
            return "messages" if isinstance(node.arg, nodes.Slice) else "message"
        return None

    def _filtered(self, node: nodes.Filter) -> Kind | None:
        of = self.kind(node.node) if node.node is not None else "shape"
        bare = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if of in _TEXTS and bare:
            if node.name == "string":
                return of
            if node.name == "trim" and of == "words":
                return "trimmed"
        if of == "messages":
            if node.name in ("length", "count") and bare:
                return "shape"
            if node.name in ("first", "last") and bare:
                return "message"
            if node.name in ("selectattr", "rejectattr") and node.args and _constant(node.args[0]) == "role":
                for argument in node.args:
                    self._need(argument, frozenset(("shape",)))
                return "messages" if not node.kwargs and not node.dyn_args and not node.dyn_kwargs else None
            if node.name == "list" and bare:
                return "messages"
        return None

    def _called(self, node: nodes.Call) -> Kind | None:
        method = node.node
        if not isinstance(method, nodes.Getattr) or method.attr not in _STRIPS or self.kind(method.node) != "words":
            return None
        has_one = len(node.args) == 1 and _constant(node.args[0]) == "\n"
        if node.kwargs or node.dyn_args or node.dyn_kwargs or (node.args and not has_one):
            return None
        return "trimmed"

    def _tested(self, node: nodes.Test) -> Kind | None:
        if node.name in _TYPE_TESTS and not node.args and self.kind(node.node) in _KNOWN:
            return "shape"
        return None

    def _compared(self, node: nodes.Compare) -> Kind | None:
        if len(node.ops) != 1:
            return None
        [operand] = node.ops
        if (
            operand.op in ("in", "notin")
            and isinstance(_constant(node.expr), str)
            and self.kind(operand.expr) == "message"
        ):
            return "shape"
        # Words are never blank: what is blank in a row belongs to its shape.
        other = _constant(operand.expr)
        is_blank = other is None or (isinstance(other, str) and not other.strip())
        if operand.op in ("eq", "ne") and is_blank and isinstance(operand.expr, nodes.Const):
            return "shape" if self.kind(node.expr) in _TEXTS else None
        return None


_RULES: dict[type[nodes.Node], Callable[..., Kind | None]] = {
    nodes.Add: _Flow._joined,
    nodes.Concat: _Flow._joined,
    nodes.Or: _Flow._either,
    nodes.And: _Flow._either,
    nodes.CondExpr: _Flow._chosen,
    nodes.Not: _Flow._denied,
    nodes.Getattr: _Flow._field,
    nodes.Getitem: _Flow._field,
    nodes.Filter: _Flow._filtered,
    nodes.Call: _Flow._called,
    nodes.Test: _Flow._tested,
    nodes.Compare: _Flow._compared,
}


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None


def _wider(one: Kind, other: Kind) -> Kind:
    if one == other:
        return one
    if {one, other} <= _TEXTS | {"shape"}:
        return "text"
    raise _Unproven
