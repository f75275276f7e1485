"""Read a Python script or notebook as a syntax tree: constants and simple expressions are followed, nothing is run."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, cast

from tunewell.core.errors import UserError
from tunewell.features.migrate.ledger import Computed, ForeignConfig, Setting, tables

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST, _MAX_PARTS, _MAX_STATEMENTS = 1e15, 10_000, 20_000
_PLAIN_CALLS = {"int": int, "float": float, "str": str, "bool": bool, "Path": str, "dict": dict}
_MAGIC = re.compile(r"^(\s*)[!%?].*$", re.MULTILINE)
_CONFIG = ("Config", "Arguments")


@dataclass(frozen=True)
class Rows:
    """The rows of a `load_dataset`: its arguments, and the methods called on them."""

    parts: tuple[Setting, ...]

    def __str__(self) -> str:
        return str(self.parts[0].value) if self.parts else "rows"


def notebook_code(text: str) -> str | None:
    """Return the code of a notebook, or None for another JSON file. Cells that are not Python become comments."""
    try:
        cells = json.loads(text)["cells"]
        parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return "\n".join(part if _is_python(part) else re.sub("(?m)^", "# ", part) for part in parts)


def _is_python(cell: str) -> bool:
    try:
        _parse(cell)
    except UserError:
        return False
    return not re.match(r"\s*%%(?!capture|time)", cell)


def _parse(text: str, name: str = "") -> ast.Module:
    """Parse code without the lines that are commands of the shell or of the notebook."""
    try:
        with warnings.catch_warnings():  # of escapes and numbers in code of others
            warnings.simplefilter("ignore")
            return ast.parse(dedent(_MAGIC.sub(r"\1pass", text)))
    except SyntaxError as error:
        raise UserError(f"the script is not Python: {error.msg}", where=f"{name} line {error.lineno}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"the script cannot be read: {error}", where=name) from None


def read_script(text: str, name: str) -> ForeignConfig:
    """Read the settings of a script. Raise UserError if it is not Python, or trains what tunewell does not."""
    tree = _parse(text, name)
    _refuse(tree, name, text)
    reader = _Reader(name, text)
    try:
        reader.read(tree.body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the script cannot be read: {error}", where=name) from None
    return reader.finish()


def _refuse(tree: ast.Module, name: str, text: str) -> None:
    """Raise UserError for a script that trains what tunewell does not. Trainers are named before models."""
    calls = [(_dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for called, node in sorted(calls, key=lambda pair: not pair[0].endswith("Trainer")):
        row = _known(called) or {}
        if "refuse" in row and re.search(row.get("only_with", ""), text):
            what = f"`{called}` trains {row['refuse']}, which tunewell does not"
            where = f"{name} line {node.lineno}"
            raise UserError(what, where=where, fix="only supervised fine-tuning on text is read")


def _known(name: str) -> dict[str, Any] | None:
    """Return the row of a call in the table."""
    *_, owner, last = ["", *name.split(".")]
    return tables()["calls"].get(f"{owner}.{last}") or tables()["calls"].get(last)


class _Reader:
    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.foreign = ForeignConfig("transformers", text)
        self.names: dict[str, Any] = {}
        self.imported: dict[str, str] = {}
        self.rows: Any = None
        self.held_out: Any = None
        self.loaded: list[Setting] = []
        self.num_statements = 0

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Read statements in their order. Branches that are never taken are left out."""
        for node in body:
            self.num_statements += 1
            if self.num_statements > _MAX_STATEMENTS:
                raise ValueError(f"it has over {_MAX_STATEMENTS} statements")
            if isinstance(node, ast.If):
                self._branch(node)
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.names[node.name] = Computed(ast.unparse(node))
                for argument, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
                    self.names.setdefault(argument.arg, self.value(default))
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.For | ast.AugAssign):
                self._assign(node.target, Computed(ast.unparse(node.target)))
                self.value(node.iter if isinstance(node, ast.For) else node.value)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                value = self.value(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, value)
            else:
                self._inside(node)
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                for inner in cast(list[Any], getattr(node, part, [])):
                    self.read([inner] if isinstance(inner, ast.stmt) else inner.body)

    def _inside(self, node: ast.AST) -> None:
        """Read the expressions inside a statement or an expression that is not followed."""
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.expr):
                self.value(inner)
            elif not isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case):
                self._inside(inner)

    def _branch(self, node: ast.If) -> None:
        """Read the branch that is taken; if that is not known, read both. Names on which they differ are unknown."""
        test = self.value(node.test)
        if not isinstance(test, Computed):
            self.read(node.body if test else node.orelse)
            return
        before = dict(self.names)
        self.read(node.body)
        after, self.names = self.names, before
        self.read(node.orelse)
        for name, value in after.items():
            is_same = name not in self.names or self.names[name] == value
            self.names[name] = value if is_same else Computed(f"{value} or {self.names[name]}"[:60])

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, Computed) and owner.call.endswith(_CONFIG):
                self.foreign.settings.append(Setting(target.attr, value, self.name, target.lineno, owner.call))
            self.names[target.attr] = value
        elif isinstance(target, ast.Subscript) and isinstance(owner := self.value(target.value), dict):
            owner[str(self.value(target.slice))] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = cast(list[Any], value) if isinstance(value, list) else [value] * len(target.elts)
            for part, one in zip(target.elts, values, strict=False):
                self._assign(part, one)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression if it follows from constants, else `Computed`."""
        unknown = Computed(ast.unparse(node)[:60])
        try:
            found = self._value(node, unknown)
        except (ArithmeticError, TypeError, ValueError, LookupError):
            return unknown
        return found if _num_parts(found) < _MAX_PARTS else unknown

    def _value(self, node: ast.expr, unknown: Computed) -> Any:
        match node:
            case ast.Constant():
                return node.value if isinstance(node.value, str | int | float | bool | None) else unknown
            case ast.Name():
                return self.names.get(node.id, unknown)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(part) for part in node.elts]
            case ast.Dict():
                found: dict[str, Any] = {}
                for key, inner in zip(node.keys, map(self.value, node.values), strict=True):
                    spread = inner if isinstance(inner, dict) else {f"**{inner}": Computed("unknown")}
                    found |= {str(self.value(key)): inner} if key else cast(dict[str, Any], spread)
                return found
            case ast.JoinedStr():
                parts = [self.value(part) for part in node.values]
                return unknown if any(isinstance(one, Computed) for one in parts) else "".join(map(str, parts))
            case ast.FormattedValue():
                return self.value(node.value)
            case ast.UnaryOp():
                inner = self.value(node.operand)
                if isinstance(inner, Computed) or inner == "auto":
                    return inner
                return not inner if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
            case ast.BinOp():
                return self._binary(node, unknown)
            case ast.IfExp():
                test, then, other = map(self.value, (node.test, node.body, node.orelse))
                return unknown if isinstance(test, Computed) else then if test else other
            case ast.Attribute():
                self.value(node.value)
                return _dotted(node) if _dotted(node).startswith("torch.") else self.names.get(node.attr, unknown)
            case ast.Subscript():
                inner, key = self.value(node.value), self.value(node.slice)
                if isinstance(inner, Rows):
                    return Rows((*inner.parts, Setting("split", key, self.name, node.lineno, "[...]")))
                return inner[key]
            case ast.Call():
                return self._call(node)
            case _:
                self._inside(node)
                return unknown

    def _binary(self, node: ast.BinOp, unknown: Computed) -> Any:
        left, right, kind = self.value(node.left), self.value(node.right), node.op
        are_numbers = all(isinstance(one, int | float) and abs(one) < _LARGEST for one in (left, right))
        are_joined = isinstance(kind, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
        if isinstance(kind, ast.Div) and isinstance(right, str) and isinstance(left, str):
            return f"{left}/{right}"  # of a `Path`
        if type(kind) in _OPERATORS and (are_numbers or are_joined):
            return _OPERATORS[type(kind)](left, right)
        return unknown

    def _call(self, node: ast.Call) -> Any:
        name = _dotted(node.func)
        name = self.imported.get(name, name)
        last, known = name.rpartition(".")[2], _known(name)
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        given = list(self._arguments(node, (known or {}).get("order", "").split()))
        words = {key: value for key, value, _ in given}
        plain = [value for key, value, _ in given if key.startswith("argument ")]
        unknown = Computed(ast.unparse(node)[:60])
        if isinstance(owner, Rows):
            value = words.get("test_size", next(iter(words.values()), None))
            return Rows((*owner.parts, Setting(last, value, self.name, node.lineno)))
        if isinstance(owner, dict) and last == "update":
            owner |= {key: words[key] for key in words if " " not in key} | (plain[0] if plain else {})
        elif last == "load_dataset" and isinstance(words.get("path"), str):
            parts = tuple(Setting(key, value, self.name, line, last) for key, value, line in given)
            self.loaded += parts
            return Rows(parts)
        elif known is not None and known.get("only_key", "") in ("", *words):
            self._settings(given, ".".join(name.split(".")[-2:] if "pretrained" in name else [last]), known, node)
            return Computed(unknown.text, last)
        elif last == "add_argument" and plain and "default" in words:
            self.names[str(plain[0]).lstrip("-").replace("-", "_")] = words["default"]
        elif last in tables()["rows"]["passed_on"].split() and plain:
            return plain[0]
        elif last in ("is_bfloat16_supported", "is_bf16_supported"):
            return "auto"
        elif last == "dict" and not plain:
            return words
        elif last in ("get", "getenv") and "environ" in name + "getenv" and len(plain) == 2:
            return plain[1]
        elif last in _PLAIN_CALLS and len(plain) == 1 and not isinstance(plain[0], Computed):
            return _PLAIN_CALLS[last](plain[0])
        return unknown

    def _arguments(self, node: ast.Call, order: Sequence[str]) -> Iterator[tuple[str, Any, int]]:
        """Yield the name, the value and the line of each argument. `order` names those without a name."""
        for number, argument in enumerate(node.args):
            name = order[number] if number < len(order) else f"argument {number + 1}"
            yield name, self.value(argument), argument.lineno
        for word in node.keywords:
            value = self.value(word.value)
            spread = cast(dict[str, Any], value) if isinstance(value, dict) else {f"**{value}": Computed("unknown")}
            for key, one in ({word.arg: value} if word.arg else spread).items():
                yield str(key), one, word.value.lineno

    def _settings(
        self, given: Sequence[tuple[str, Any, int]], short: str, known: Mapping[str, Any], node: ast.Call
    ) -> None:
        foreign = self.foreign
        if "tool" in known and foreign.tool != "unsloth":
            foreign.tool = known["tool"]
        foreign.defaults += known.get("defaults", "").split()
        foreign.own |= {"method.kind": known["method"]} if "method" in known else {}
        if short.endswith(_CONFIG):
            for one in [one for one in foreign.settings if one.call == short]:
                foreign.settings.remove(one)
                foreign.add(one, "lost", why=f"another `{short}` follows in line {node.lineno}, which is the one read")
        for name, value, line in given:
            one = Setting(name, value, self.name, line, short)
            if name == "train_dataset":
                self.rows = one
            elif name == "eval_dataset" and value is not None:
                self.held_out = one
            elif name in tables()["rows"]["wiring"].split() and not isinstance(value, str):
                foreign.add(one, "not needed", why="it passes on what another line makes")
            else:
                foreign.settings.append(one)
                self.names.setdefault(name, value)
        if short == "train_on_responses_only":
            foreign.settings.append(Setting(short, True, self.name, node.lineno))

    def finish(self) -> ForeignConfig:
        """Return what was read, with the rows that the last trainer gets, or the last that were loaded."""
        foreign = self.foreign
        if re.search(r"\.from_pretrained\(", foreign.text) and "get_peft_config" not in foreign.text:
            foreign.own.setdefault("method.kind", "full")
        loaded = [one for one in self.names.values() if isinstance(one, Rows)][-1:]
        if self.rows is not None:
            listed = cast(list[Any], self.rows.value) if isinstance(self.rows.value, list) else [self.rows.value]
            given = [one for one in listed if isinstance(one, Rows)]
            is_known, loaded = len(given) == len(listed), given or loaded
            why = "" if is_known else "rows are made while the script runs: check `data.sources`, and name their file"
            foreign.add(self.rows, "translated" if is_known else "lost", "data.sources" if is_known else "", why)
        foreign.data_sets += [list(one.parts) for one in loaded]
        used = {part for one in loaded for part in one.parts}
        for part in dict.fromkeys(self.loaded):
            if part not in used:
                foreign.add(part, "not needed", why="the trainer does not get these rows")
        is_split = any(part.name == "train_test_split" for one in loaded for part in one.parts)
        if self.held_out is not None and is_split:
            foreign.add(self.held_out, "translated", "data.held_out")
        elif self.held_out is not None:
            why = "rows of a split or of another file are not read: `data.held_out: FILE` names a file"
            foreign.add(self.held_out, "lost", why=why)
        return foreign


def _num_parts(value: Any) -> int:
    """Return the size of a value: a few lines can double a list or a text until it fills the memory."""
    if isinstance(value, str):
        return 1 + len(value) // 100
    if isinstance(value, dict):
        value = list(cast(dict[str, Any], value).values())
    return 1 + sum(map(_num_parts, cast(list[Any], value))) if isinstance(value, list) else 1


def _dotted(node: ast.expr) -> str:
    """Return a name like `torch.bfloat16`, or its last parts if the first is an expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
