"""`tunewell inspect`."""

from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, ConfigFile, Sets

if TYPE_CHECKING:
    from rich.console import Console

    from tunewell.records.manifest import Manifest
    from tunewell.workflows.inspect import DocumentView, Inspection

_BAR_WIDTH = 40


def command(
    path: Annotated[str | None, typer.Argument(help="A corpus, or a file, folder or glob of rows.")] = None,
    config: ConfigFile = None,
    set_: Sets = None,
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer and template are used on rows.")] = None,
    show: Annotated[int, typer.Option(min=0, help="How many documents to show token by token.")] = 2,
    document: Annotated[
        list[int] | None, typer.Option(min=0, help="Show this document, counted from 0; may be repeated.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="List each token on a line, with its id.")] = False,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show documents of the held-out part.")] = False,
    json: AsJson = False,
) -> None:
    """Look at rows or a corpus: lengths, ledger, and token by token what is learned."""
    from tunewell.cli.progress import shown_progress
    from tunewell.cli.render import console, emit_json
    from tunewell.config.load import load_config
    from tunewell.workflows.inspect import inspect

    loaded = load_config(config, set_ or (), model=model)
    with shown_progress() as progress:
        seen = inspect(path, loaded, wanted=document or range(show), is_held_out=held_out, progress=progress)
    if json:
        emit_json(seen.as_json())
    else:
        _screen(seen, console(), as_list=tokens)


def _screen(seen: "Inspection", out: "Console", *, as_list: bool) -> None:
    from tunewell.cli.commands.prepare import corpus_rows
    from tunewell.cli.render import table

    out.print(table(corpus_rows(seen.manifest)))
    out.print("\ntokens in a document")
    out.print(_histogram(seen.manifest))
    out.print("\nwhere the rows went")
    out.print(_ledger(seen.manifest))
    for view in seen.documents:
        learned = f"{len(view.tokens)} tokens, {view.num_learned} learned"
        out.print(f"\ndocument {view.index}: {view.source} row {view.row}, {learned}")
        if as_list:
            _list_tokens(view, out)
        else:
            _show_tokens(view, out)
    if seen.documents and not as_list:
        mark = "green" if out.color_system else "in [brackets]"
        out.print(f"\nlearned tokens are {mark}; the rest is given. `--tokens` lists them with their ids")
    if not seen.is_corpus:
        out.print("nothing was written. next: `tunewell prepare`")


def _histogram(manifest: "Manifest") -> str:
    from tunewell.cli.render import table
    from tunewell.core.units import count

    bins = manifest.lengths.histogram
    most = max((number for _, _, number in bins), default=1)
    rows = []
    for start, end, number in bins:
        bar = "▄" * round(_BAR_WIDTH * number / most) or ("." if number else "")
        rows.append([f"{count(start)}", f"to {count(end - 1)}", count(number), bar])
    return table(rows, right=(0, 2), gap=2)


def _ledger(manifest: "Manifest") -> str:
    from tunewell.cli.render import table
    from tunewell.core.units import count

    rows = [["source", "rows", "documents", "held out", "dropped", ""]]
    for source in manifest.sources:
        reasons = ", ".join(f"{count(number)} {reason}" for reason, number in source.dropped.items())
        numbers = (source.rows, source.documents, source.held_out, sum(source.dropped.values()))
        rows.append([source.name, *map(count, numbers), reasons])
    if len(manifest.sources) > 1:
        totals = (manifest.rows_in, manifest.documents, manifest.held_out, sum(manifest.dropped.values()))
        rows.append(["all", *map(count, totals), ""])
    return table(rows, right=(1, 2, 3, 4))


def _show_tokens(view: "DocumentView", out: "Console") -> None:
    """Print a document as it reads; learned tokens alternate between two greens, so that each one is seen."""
    from rich.text import Text

    text = Text()
    parity = False
    for token in view.tokens:
        shown = _visible(token.text)
        if not token.is_learned:
            text.append(shown, style="dim")
        elif out.color_system:
            text.append(shown, style="bright_white on color(22)" if parity else "bright_white on color(28)")
        else:
            lead = shown.rstrip("\n")
            text.append(f"[{lead}]{shown[len(lead) :]}")
        parity = not parity
    text.rstrip()
    out.print(text)


def _list_tokens(view: "DocumentView", out: "Console") -> None:
    from tunewell.cli.render import table

    rows = [["place", "id", "token", ""]]
    for place, token in enumerate(view.tokens):
        rows.append([str(place), str(token.id), repr(token.text)[1:-1], "learned" if token.is_learned else ""])
    out.print(table(rows, right=(0, 1)))


def _visible(text: str) -> str:
    """Keep line breaks but show them too; other control characters are spelled out, so none reaches the terminal."""
    shown = "".join(
        character if character == "\n" or character.isprintable() else repr(character)[1:-1] for character in text
    )
    return shown.replace("\n", "⏎\n")
