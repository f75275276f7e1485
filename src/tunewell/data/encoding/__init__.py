"""Encoding: turn planned conversations and plain text into token ids and a loss mask.

The package splits a document at the template's markers and encodes the text between them as plain text. It must not
depend on files, blocks or packing. Start with `encoder.py`.
"""
