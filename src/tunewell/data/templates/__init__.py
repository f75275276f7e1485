"""Chat templates: render a conversation to the text that a model reads, with the template's code in a sandbox.

The package owns the template language, its limits and the built-in templates. It must not know about tokens or masks.
Start reading with `chat_template.py`; `sandbox.py` and `budget.py` contain untrusted template code.
"""
