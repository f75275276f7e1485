"""`tunewell watch`: a local page from a file to a verdict, an export and a chat."""

import json as json_module
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.render import emit, folded_table


def command(
    folder: Annotated[Path, Argument("Folder with runs and rows. It may be empty.", "FOLDER")] = Path(),
    port: Annotated[int, Option("Port to listen on. 0 chooses a free port.", "N", min=0, max=65535)] = 8765,
    host: Annotated[str, Option("Address to listen on. A public address needs a token.", "ADDRESS")] = "127.0.0.1",
    token_file: Annotated[
        Path | None, Option("File with the token that the page asks for. Or set TUNEWELL_TOKEN.", "FILE")
    ] = None,
    no_open: Annotated[bool, Option("Do not open a browser.")] = False,
    read_only: Annotated[bool, Option("Only show: nothing can be started, stopped or uploaded.")] = False,
    json: AsJson = False,
) -> None:
    """Open a page in your browser: from a file to a trained model, its verdict and a chat.

    Closing the page or ending this command changes no run: runs are processes of their own.
    """
    from tunewell.features.watch.workflow import WatchOptions, open_browser, open_page

    server = open_page(folder.expanduser(), WatchOptions(host, port, token_file, read_only))
    info = server.info
    if json:
        sys.stdout.write(json_module.dumps(asdict(info)) + "\n")
    else:
        mode = "shows only" if read_only else "runs that it starts go on without it"
        rows = [["folder", f"`{info.folder}`"], ["listens on", f"{info.listens_on}; {mode}"]]
        emit(folded_table([*rows, *(["note", note] for note in info.notes)]))
        sys.stdout.write(f"\n{info.url}\n\n")  # `emit` would hide the token
        emit("open this address in a browser; it is valid until Ctrl-C ends this command")
    sys.stdout.flush()
    if not no_open and not json:
        open_browser(info, folder.expanduser())
    if code := server.run():
        raise typer.Exit(0 if code == 130 else code)
