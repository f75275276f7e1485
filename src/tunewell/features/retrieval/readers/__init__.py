"""Document readers: one module per file format, each with a function that returns a `ParsedDocument`.

A reader gets the bytes of a file and raises `Unreadable` with the reason if there is no text. To read another format,
write one module and add a line to `READERS` in `documents.py`.
"""
