"""Single rows: parse JSON, detect the format, convert to a conversation, clean, apply the user's `map` function.

A row that cannot be used raises `Rejected` with a reason from the glossary. Knows neither files nor templates. Start
with `conversation.py` and `formats.py`.
"""
