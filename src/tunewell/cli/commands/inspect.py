"""`tunewell inspect`: show rows or a corpus, token by token."""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import Argument, AsJson, ConfigOptions, Option, TokenizerModel
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import (
    bar_table,
    cell_width,
    console,
    emit,
    ending,
    folded_table,
    hanging,
    has_color,
    json_text,
    table,
    width,
)
from tunewell.cli.screens.corpus import corpus_rows
from tunewell.core.units import count, percent, size_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from tunewell.data.corpus.views import DocumentView, PairView
    from tunewell.records.manifest import Manifest
    from tunewell.scoring.answer_keys import AnswerKey
    from tunewell.workflows.inspect import Inspection

_MIN_NAME, _COUNTS, _CHOOSING = 8, 44, 11
"""Columns of the name of a source, and of the numbers beside it."""


def command(
    path: Annotated[
        str | None, Argument("A corpus, or a file, folder or glob of rows. Default: from the config.", "PATH")
    ] = None,
    *,
    given: ConfigOptions,
    model: TokenizerModel = None,
    show: Annotated[
        int | None, Option("Number of rows to show token by token. Default: 2; 200 with --html.", "N", min=0)
    ] = None,
    document: Annotated[
        list[int] | None, Option("Show document N, counted from 0. Can be repeated.", "N", min=0)
    ] = None,
    tokens: Annotated[bool, Option("List each token on its own line, with its id.")] = False,
    held_out: Annotated[bool, Option("Show rows kept for testing.")] = False,
    details: Annotated[bool, Option("Also show padding and near duplicates, even if there are none.")] = False,
    html: Annotated[Path | None, Option("Write one HTML page about the corpus, with 200 sampled rows.", "FILE")] = None,
    json: AsJson = False,
) -> None:
    """Show your rows as the model sees them, token by token."""
    from tunewell.workflows.inspect import inspect, write_page

    loaded = given.load(model=model)
    if html is not None:
        with shown_progress() as progress:
            num_bytes = write_page(
                html, path, loaded, wanted=document or (), num_rows=show, is_held_out=held_out, progress=progress
            )
        written = f"`{html}` ({size_bytes(num_bytes)}); open it in a browser"
        emit(json_text({"page": str(html), "bytes": num_bytes}) if json else hanging("wrote ", written))
        return
    wanted = document or range(2 if show is None else show)
    with shown_progress() as progress:
        inspection = inspect(path, loaded, wanted=wanted, is_held_out=held_out, progress=progress)
    if json:
        emit(json_text(inspection.as_json()))
    else:
        rows = [path] if path and not inspection.is_corpus and loaded.file is None else []
        train = given.train_command(model=model, data=rows)
        _screen(inspection, console(), as_list=tokens, has_details=details, train=train)


def _screen(inspection: "Inspection", out: "Console", *, as_list: bool, has_details: bool, train: str) -> None:
    def section(title: str, rows: "Sequence[Sequence[str]]", *right: int) -> None:
        if rows:
            out.print(f"\n{title}\n{folded_table(rows, right=right)}")

    manifest = inspection.manifest
    folder = inspection.path if inspection.is_corpus else None
    out.print(folded_table(corpus_rows(manifest, folder=folder, has_details=has_details), right=(1,)))
    out.print(f"\n{bar_table(inspection.lengths)}")
    out.print(f"\nrows per source\n{_source_table(manifest)}")
    dropped = [
        [row.reason, _visible(f"{row.source} row {row.row}" + f": {row.detail}" * bool(row.detail))]
        for row in inspection.dropped
    ]
    section("dropped rows, the first of each reason", dropped)
    secrets = [[kind, f"{row.source} row {row.row}"] for kind, row in inspection.secrets.items()]
    section("rows with secrets, the first of each kind", secrets)
    section("answer keys, by which `validate` judges answers", _key_rows(inspection.keys), 1)
    if inspection.pairs:
        out.print("\nnear duplicates, the most similar first")
    for pair in inspection.pairs:
        _show_pair(pair, out)
    for view in inspection.documents:
        size = f"{len(view.tokens)} tokens, {view.num_supervised} trained on"
        out.print("\n" + hanging("", f"document {view.index} ({view.source} row {view.row}): {size}"))
        if as_list:
            _list_tokens(view, out)
        else:
            _show_tokens(view, out)
    if inspection.documents and not as_list:
        mark = "on green" if has_color(out) else "in [brackets]"
        legend = f"tokens {mark} are trained on, the others are context; `--tokens` lists them with their ids"
        out.print("\n" + hanging("", legend))
    if not inspection.is_corpus:
        out.print("nothing was written")
    out.print(hanging("next: ", f"`{train}`"))


def _source_table(manifest: "Manifest") -> str:
    counted = [("training", "documents"), ("choosing", "selected"), ("testing", "held_out")]
    counted = [(title, name) for title, name in counted if name != "selected" or manifest.selected]
    rows = [["source", "rows", *(title for title, _ in counted), "dropped", ""]]
    name_width = max(_MIN_NAME, width() - _COUNTS - (_CHOOSING if manifest.selected else 0))
    for source in manifest.sources:
        reasons = ", ".join(f"{count(number)} {reason}" for reason, number in source.dropped.items())
        numbers = (source.rows, *(getattr(source, name) for _, name in counted), sum(source.dropped.values()))
        rows.append([ending(source.name, name_width), *map(count, numbers), reasons])
    if len(manifest.sources) > 1:
        kept = (getattr(manifest, name) for _, name in counted)
        totals = (manifest.rows_in, *kept, sum(manifest.dropped.values()))
        rows.append(["all", *map(count, totals), ""])
    return folded_table(rows, right=tuple(range(1, len(rows[0]) - 1)))


def _key_rows(keys: "Sequence[AnswerKey]") -> list[list[str]]:
    """Return the number of keys of each origin, with up to three examples."""
    rows: list[list[str]] = []
    for origin in dict.fromkeys(key.origin for key in keys):
        found = [key for key in keys if key.origin == origin]
        examples = [f"{_visible(key.text)} ({key.because})" for key in found[:: -(-len(found) // 3)] if key.is_judged]
        rows.append([origin, count(len(found)), "; ".join(examples) or found[0].because])
    return rows


def _show_pair(view: "PairView", out: "Console") -> None:
    pair, held_out = view.pair, " (for testing)" if view.pair.kind == "near_held_out" else ""
    names = f"{pair.source} row {pair.row} and {pair.similar_source} row {pair.similar_row}{held_out}"
    dropped = "" if view.documents else "; dropped"
    out.print(hanging("", f"{percent(pair.similarity)} similar: {names}{dropped}"))
    for text in view.excerpts() or ():
        out.print(hanging("  ", "..." + _visible(text).replace("⏎\n", "⏎") + "..."))


def _show_tokens(view: "DocumentView", out: "Console") -> None:
    """Print a document as text. Supervised tokens alternate between two shades of green, or are in brackets."""
    from rich.text import Text

    if not has_color(out):
        out.print(Text(_bracketed(view)))
        return
    text = Text()
    for number, token in enumerate(view.tokens):
        shade = "bright_white on color(22)" if number % 2 else "bright_white on color(28)"
        text.append(_visible(token.text), style=shade if token.is_supervised else "dim")
    text.rstrip()
    # Not soft-wrapped like other output: a document is longer than a line, and a terminal would cut tokens in two.
    out.print(text, soft_wrap=False, overflow="fold", width=width())


def _bracketed(view: "DocumentView") -> str:
    """Return a document as text with its supervised tokens in brackets, wrapped between words and brackets."""
    pieces: list[str] = []
    for is_supervised, tokens in groupby(view.tokens, key=lambda token: token.is_supervised):
        texts = [_visible(token.text) for token in tokens]
        if is_supervised:
            bodies = [text.rstrip("\n") for text in texts]
            pieces += [f"[{body}]{text[len(body) :]}" for text, body in zip(texts, bodies, strict=True)]
        else:
            pieces += re.findall(rf"\n|[^\S\n]*\S{{1,{width() // 2}}}|[^\S\n]+", "".join(texts))
    text, column = "", 0
    for piece in pieces:
        is_full = column and column + cell_width(piece.strip("\n")) > width()
        shown = f"\n{piece.lstrip(' ')}" if is_full else piece
        text += shown
        column = cell_width(shown.rpartition("\n")[2]) + (0 if "\n" in shown else column)
    return text.rstrip("\n")


def _list_tokens(view: "DocumentView", out: "Console") -> None:
    rows = [
        [str(position), str(token.id), repr(token.text)[1:-1], "trained on" if token.is_supervised else ""]
        for position, token in enumerate(view.tokens)
    ]
    out.print(table([["position", "id", "token", ""], *rows], right=(0, 1)))


def _visible(text: str) -> str:
    """Mark line breaks, and escape other control characters so that none reaches the terminal."""
    shown = "".join(
        character if character == "\n" or character.isprintable() else repr(character)[1:-1] for character in text
    )
    return shown.replace("\n", "⏎\n")
