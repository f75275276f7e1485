"""Read a Python script or notebook as a syntax tree: constants and simple expressions are followed, nothing is run."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any, cast

from tunewell.core.errors import UserError
from tunewell.features.migrate.ledger import Computed, Entry, ForeignConfig, Setting, entry
from tunewell.features.migrate.rows import source_of, tables

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST, _LONGEST = 1e15, 100_000
_PLAIN_CALLS = {"int": int, "float": float, "str": str, "bool": bool}
_PRECISION_CALLS = ("is_bfloat16_supported", "is_bf16_supported")
_SAME_ROWS = ("shuffle", "remove_columns", "with_format", "to_iterable_dataset", "flatten_indices", "select_columns")
_NAMED_ROWS = ("standardize_sharegpt", "standardize_data_formats", "concatenate_datasets", "interleave_datasets")
_WIRING = (
    "model",
    "args",
    "tokenizer",
    "processing_class",
    "peft_config",
    "train_dataset",
    "trainer",
    "quantization_config",
)
_MAGIC = re.compile(r"^\s*[!%].*$", re.MULTILINE)
_MAX_STATEMENTS = 20_000


@dataclass
class Rows:
    """The rows of a `load_dataset` and what is done to them."""

    source: dict[str, Any]
    entries: list[Entry] = field(default_factory=list[Entry])
    test_size: Any = None
    others: list["Rows"] = field(default_factory=list["Rows"])


def notebook_code(text: str) -> str | None:
    """Return the code of a notebook, or None for another JSON file. Cells that are not Python become comments."""
    try:
        cells = json.loads(text)["cells"]
        parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return "\n".join(part if _is_python(part) else f"# {part}".replace("\n", "\n# ") for part in parts)


def _parsed(code: str) -> ast.Module:
    with warnings.catch_warnings():  # of escapes and numbers in code of others
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _is_python(cell: str) -> bool:
    try:
        _parsed(_without_magic(cell))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return not cell.lstrip().startswith("%%bash")


def _without_magic(code: str) -> str:
    """Replace the lines of a notebook that are commands of the shell or of the notebook."""
    code = re.sub(r"^%%\w+[^\n]*$", "#", code, flags=re.MULTILINE)
    return _MAGIC.sub(lambda found: re.sub(r"[!%]", "pass #", found[0], count=1), code)


def read_script(text: str, name: str) -> ForeignConfig:
    """Read the settings of a script. Raise UserError if it is not Python, or trains what tunewell does not."""
    code = dedent(_without_magic(text))
    try:
        tree = _parsed(code)
        _refuse(tree, name, code)
        reader = _Reader(name, ForeignConfig("transformers", text=text))
        reader.read(tree.body)
    except SyntaxError as error:
        raise UserError(f"the script is not Python: {error.msg}", where=f"{name} line {error.lineno}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"the script cannot be read: {error}", where=name) from None
    reader.finish()
    return reader.foreign


def _refuse(tree: ast.Module, name: str, code: str) -> None:
    """Raise UserError for a script that trains what tunewell does not. Trainers are named before models."""
    found = [(_known(_dotted(call.func)), call) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    refused = [(row, call) for row, call in found if row and "refuse" in row]
    for row, call in sorted(refused, key=lambda pair: not _dotted(pair[1].func).endswith("Trainer")):
        if "only_with" not in row or re.search(row["only_with"], code):
            what = f"`{_dotted(call.func)}` trains {row['refuse']}, which tunewell does not"
            fix = "only supervised fine-tuning on text is read"
            raise UserError(what, where=f"{name} line {call.lineno}", fix=fix)


def _known(name: str) -> dict[str, Any] | None:
    """Return the row of a call in the table."""
    calls = tables()["calls"]
    return calls.get(".".join(name.split(".")[-2:])) or calls.get(name.split(".")[-1])


class _Reader:
    def __init__(self, name: str, foreign: ForeignConfig) -> None:
        self.name = name
        self.foreign = foreign
        self.names: dict[str, Any] = {}
        self.functions: dict[str, str] = {}
        self.rows: Rows | None = None
        self.num_statements = 0

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Read statements in their order. Branches that are never taken are left out."""
        for node in body:
            self.num_statements += 1
            if self.num_statements > _MAX_STATEMENTS:
                raise ValueError(f"it has over {_MAX_STATEMENTS} statements")
            if isinstance(node, ast.If) and self.value(node.test) is False:
                self.read(node.orelse)
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[node.name] = ast.unparse(node)
                for argument, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
                    self.names.setdefault(argument.arg, self.value(default))
            blocks = [cast(list[ast.stmt], getattr(node, part, [])) for part in ("body", "orelse", "finalbody")]
            if not any(blocks):
                self._calls(node)
                self._assign(node)
            for block in blocks:
                self.read(block)

    def _assign(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        value = self.value(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name | ast.Attribute):
                self.names[target.id if isinstance(target, ast.Name) else target.attr] = value
            elif isinstance(target, ast.Tuple) and isinstance(value, list):
                for part, one in zip(target.elts, cast(list[Any], value), strict=False):
                    if isinstance(part, ast.Name):
                        self.names[part.id] = one

    def _calls(self, node: ast.AST) -> None:
        for call in [part for part in ast.walk(node) if isinstance(part, ast.Call)][::-1]:
            name = _dotted(call.func)
            self.foreign.words.add(name.rpartition(".")[2])
            known = _known(name)
            words = [word.arg for word in call.keywords]
            if known is not None and known.get("only_key", words[0] if words else "") in [*words, ""]:
                self._settings(call, name, known)
            elif name.endswith("add_argument") and call.args:
                given = {word.arg: word.value for word in call.keywords}
                option = self.value(call.args[0])
                if "default" in given and isinstance(option, str):
                    self.names[option.lstrip("-").replace("-", "_")] = self.value(given["default"])

    def _settings(self, call: ast.Call, name: str, known: Mapping[str, Any]) -> None:
        foreign, short = self.foreign, ".".join(name.split(".")[-2:] if "pretrained" in name else name.split(".")[-1:])
        if "tool" in known and foreign.tool != "unsloth":
            foreign.tool = known["tool"]
        foreign.defaults += known.get("defaults", "").split()
        if "method" in known:
            foreign.own["method.kind"] = known["method"]
        for label, value, line in self._arguments(call, known):
            at = Setting(label, value, self.name, line, short)
            is_wired = isinstance(value, Computed) and label in _WIRING
            if label in ("train_dataset", "eval_dataset") and not (label == "eval_dataset" and value is None):
                self._rows(at)
            elif label == "data_collator" and "DataCollator" in str(value):
                foreign.entries.append(entry(at, "not needed", why="documents are packed, so nothing is collated"))
            elif label in ("map", "formatting_func"):
                self._function(at, str(value))
            elif is_wired or (label in _WIRING and not isinstance(value, str)):
                foreign.entries.append(entry(at, "not needed", why="it passes on what another line makes"))
            elif label == "tokenizer_name_or_path" and value == self.names.get("model_name_or_path", value):
                foreign.entries.append(entry(at, "not needed", why="the tokenizer is that of the model"))
            else:
                is_model = label == "model" and isinstance(value, str)
                foreign.settings.append(
                    Setting("model_name_or_path" if is_model else label, value, self.name, line, short)
                )
                self.names.setdefault(label, value)
        if short == "train_on_responses_only":
            foreign.settings.append(Setting(short, True, self.name, call.lineno))

    def _arguments(self, call: ast.Call, known: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
        """Yield the name, the value and the line of each argument."""
        if call.args and "first" in known:
            yield known["first"], self.value(call.args[0]), call.args[0].lineno
        for word in call.keywords:
            value = self.value(word.value)
            if word.arg is not None:
                yield word.arg, value, word.value.lineno
            elif isinstance(value, dict):
                for key, one in cast(dict[str, Any], value).items():
                    yield str(key), one, word.value.lineno
            else:
                yield f"**{ast.unparse(word.value)[:40]}", Computed("unknown"), word.value.lineno

    def _rows(self, at: Setting) -> None:
        rows = at.value
        if at.name == "eval_dataset":
            if isinstance(rows, Rows) and self.rows is not None and self.rows.test_size is not None:
                self.foreign.entries.append(entry(_with(at, "the other part"), "translated", "data.held_out"))
            else:
                why = "rows of a split or of another file are not read: `data.held_out: FILE` names a file"
                self.foreign.entries.append(entry(_with(at, "rows"), "lost", why=why))
        elif isinstance(rows, Rows):
            self.rows = rows
            path = ", ".join(str(one.source["path"]) for one in [rows, *rows.others])
            self.foreign.entries.append(entry(_with(at, path), "translated", "data.sources"))
        else:
            why = "the rows are made while the script runs: check `data.sources`, and name their file"
            self.foreign.entries.append(entry(at, "lost", why=why))

    def _function(self, at: Setting, function: str) -> None:
        body, given = self.functions.get(function, function), at
        if "apply_chat_template" in body:
            why = "the chat template is applied in `prepare`"
            self.foreign.entries.append(entry(given, "not needed", why=why))
        elif "truncation" in body or "input_ids" in body:
            self.foreign.entries.append(entry(given, "not needed", why="rows are tokenized in `prepare`"))
        elif "###" in body or "alpaca" in body.lower():
            self.foreign.own |= {"template.name": "alpaca"}
            why = "the text of the function is that of the Alpaca template"
            self.foreign.entries.append(entry(given, "translated", "template.name: alpaca", why))
        else:
            why = f"the function is not run: write it to a file, and set `map: FILE.py:{function[:40]}` on the source"
            self.foreign.entries.append(entry(given, "lost", why=why))

    def finish(self) -> None:
        """Write the rows that the trainer gets, or the last ones that were loaded."""
        if "get_peft_config" not in self.foreign.words and "from_pretrained" in self.foreign.words:
            self.foreign.own.setdefault("method.kind", "full")
        rows = self.rows or next((one for one in reversed(list(self.names.values())) if isinstance(one, Rows)), None)
        for one in [rows, *rows.others] if rows else []:
            self.foreign.sources.append(one.source)
            self.foreign.entries += dict.fromkeys(one.entries)
            if isinstance(one.test_size, int | float):
                self.foreign.own["data.held_out"] = one.test_size

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression if it follows from constants, else `Computed`."""
        unknown = Computed(ast.unparse(node)[:60])
        try:
            return self._value(node, unknown)
        except (ArithmeticError, TypeError, ValueError, LookupError):
            return unknown

    def _value(self, node: ast.expr, unknown: Computed) -> Any:
        match node:
            case ast.Constant():
                return node.value if isinstance(node.value, str | int | float | bool | None) else unknown
            case ast.Name():
                return self.names.get(node.id, unknown)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(part) for part in node.elts]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {str(self.value(key)): self.value(value) for key, value in pairs if key is not None}
            case ast.JoinedStr():
                parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
                values = [self.value(part) for part in parts]
                return unknown if any(isinstance(one, Computed) for one in values) else "".join(map(str, values))
            case ast.UnaryOp():
                inner = self.value(node.operand)
                if isinstance(inner, Computed) or inner == "auto":
                    return inner
                return not inner if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
            case ast.BinOp():
                return self._binary(node, unknown)
            case ast.IfExp():
                test = self.value(node.test)
                return unknown if isinstance(test, Computed) else self.value(node.body if test else node.orelse)
            case ast.Attribute():
                is_dtype = _dotted(node).startswith("torch.")
                return _dotted(node) if is_dtype else self.names.get(node.attr, unknown)
            case ast.Subscript():
                inner, key = self.value(node.value), self.value(node.slice)
                if isinstance(inner, Rows):
                    if key in ("train", "test") and inner.test_size is not None:
                        return inner
                    if isinstance(key, str) and str(inner.source["path"]).startswith("hf://"):
                        return Rows({**inner.source, "split": key}, inner.entries)
                    return inner
                return inner[key]
            case ast.Call():
                return self._call(node, unknown)
            case _:
                return unknown

    def _binary(self, node: ast.BinOp, unknown: Computed) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        are_numbers = all(isinstance(one, int | float) and abs(one) < _LARGEST for one in (left, right))
        are_joined = isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
        if isinstance(node.op, ast.Div) and isinstance(right, str) and isinstance(left, str):
            return f"{left}/{right}"  # of a `Path`
        if type(node.op) in _OPERATORS and (are_numbers or (are_joined and len(left) + len(right) < _LONGEST)):
            return _OPERATORS[type(node.op)](left, right)
        return unknown

    def _call(self, node: ast.Call, unknown: Computed) -> Any:
        name = _dotted(node.func)
        last, values = name.rpartition(".")[2], [self.value(part) for part in node.args]
        words = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if last in _PRECISION_CALLS:
            return "auto"
        if last == "load_dataset":
            return self._load_dataset(node, values, words)
        if last in _NAMED_ROWS and values:
            listed = [one for one in (values[0] if isinstance(values[0], list) else values) if isinstance(one, Rows)]
            return Rows(listed[0].source, listed[0].entries, None, listed[1:]) if listed else unknown
        if isinstance(node.func, ast.Attribute) and isinstance(rows := self.value(node.func.value), Rows):
            return self._method(rows, last, node, values, words)
        if last == "dict":
            return words
        if last in ("Path", "join", "abspath", "expanduser") and values and all(isinstance(one, str) for one in values):
            return "/".join(values)
        if last in ("get", "getenv") and "environ" in name + "getenv" and len(values) == 2:
            return values[1]
        if last in _PLAIN_CALLS and len(values) == 1 and not isinstance(values[0], Computed):
            return _PLAIN_CALLS[last](values[0])
        return unknown

    def _load_dataset(self, node: ast.Call, values: list[Any], words: dict[str, Any]) -> Any:
        path = words.get("path", values[0] if values else None)
        if not isinstance(path, str):
            return Computed(ast.unparse(node)[:60])
        split = words.get("split")
        source, lost = source_of(
            path,
            split=split,
            config=words.get("name", values[1] if len(values) > 1 else None),
            files=words.get("data_files"),
            revision=words.get("revision"),
        )
        known = {"path": path, **words} if values else words
        rows = Rows(source)
        for key, value in known.items():
            at = Setting(key, value, self.name, node.lineno, "load_dataset")
            is_lost = bool(lost) and key in ("split", "data_files")
            ours = "" if is_lost else f"data.sources: path: {source['path']}"
            rows.entries.append(entry(at, "lost" if is_lost else "translated", ours, lost if is_lost else ""))
        return rows

    def _method(self, rows: Rows, last: str, node: ast.Call, values: list[Any], words: dict[str, Any]) -> Any:
        """Return the rows after a method of `datasets`."""
        at = Setting(last, Computed(", ".join(ast.unparse(part)[:40] for part in node.args)), self.name, node.lineno)
        if last == "map":
            num = len(self.foreign.entries)
            self._function(at, ast.unparse(node.args[0]) if node.args else "")
            rows.entries += self.foreign.entries[num:]
            del self.foreign.entries[num:]
        elif last == "train_test_split":
            rows.test_size = words.get("test_size", values[0] if values else 0.25)
            rows.entries.append(entry(_with(at, rows.test_size), "translated", f"data.held_out: {rows.test_size}"))
        elif last == "select" and (found := re.search(r"range\((?:min\()?(\d+)", str(at.value))):
            rows.source["limit"] = int(found[1])
            rows.entries.append(entry(at, "translated", f"data.sources: limit: {found[1]}"))
        elif last in ("rename_column", "rename_columns"):
            rows.entries.append(entry(at, "lost", why="columns keep their names: write `columns` on the source"))
        elif last in _SAME_ROWS:
            rows.entries.append(entry(at, "not needed", why="rows are shuffled; unused columns never reach the model"))
        else:
            rows.entries.append(entry(at, "lost", why=f"`{last}` is not run here: do it once, and name the file"))
        return rows


def _with(at: Setting, value: Any) -> Setting:
    return Setting(at.name, value, at.file, at.line, at.call)


def _dotted(node: ast.expr) -> str:
    """Return a name like `torch.bfloat16`, or its last parts if the first is an expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
