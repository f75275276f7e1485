"""Encoding: turn planned conversations and plain text into token ids and a loss mask.

The package owns the step from text to ids: a document is split at the template's markers, and the text between them is
encoded as plain text. It must not know about files, blocks or packing. Start reading with `encoder.py`.
"""
