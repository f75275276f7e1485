"""Turn a notebook into text: the sources and outputs of its cells, in the order of execution. Images are left out."""

from typing import Any, cast

_LONGEST_OUTPUT = 200_000


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return the code and the outputs of a notebook. Cells that were not executed come first, in the file's order."""
    raw = cast(list[Any], notebook["cells"])
    cells = [cast(dict[str, Any], cell) for cell in raw if isinstance(cell, dict)]
    code = [cell for cell in cells if cell.get("cell_type") == "code"]
    ordered = sorted(code, key=lambda cell: number if isinstance(number := cell.get("execution_count"), int) else -1)
    parts: list[str] = []
    for number, cell in enumerate(ordered):
        label = cell.get("execution_count")
        parts.append(f"# cell {label if label is not None else f'{number + 1} (not executed)'}")
        parts.append(_joined(cell.get("source")))
        outputs = cell.get("outputs")
        for output in cast(list[Any], outputs) if isinstance(outputs, list) else []:
            if isinstance(output, dict):
                parts.append(_output_text(cast(dict[str, Any], output))[:_LONGEST_OUTPUT])
    if [cell.get("execution_count") for cell in code] != [cell.get("execution_count") for cell in ordered]:
        parts.append("# the cells were not executed in the order of the file")
    return "\n".join(part for part in parts if part) + "\n"


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return "".join(part for part in cast(list[Any], text) if isinstance(part, str))
    return text if isinstance(text, str) else ""


def _output_text(output: dict[str, Any]) -> str:
    if "traceback" in output:
        traceback = output["traceback"]
        lines = cast(list[Any], traceback) if isinstance(traceback, list) else []
        return "\n".join(line for line in lines if isinstance(line, str))
    data = output.get("data")
    if isinstance(data, dict):
        kinds = cast(dict[str, Any], data)
        table = _joined(kinds.get("text/html"))
        return table if "<td" in table else _joined(kinds.get("text/plain"))
    return _joined(output.get("text"))
