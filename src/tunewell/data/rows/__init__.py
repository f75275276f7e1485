"""Single rows: parse JSON, detect the format, convert to a conversation, clean, apply the user's `map` function.

A row that cannot be used raises `Rejected` with a reason from the glossary. The package does not depend on files or
templates. Start with `conversation.py` and `formats.py`.
"""
