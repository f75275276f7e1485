"""Chat templates: render a conversation to the text that a model reads, with the template's code in a sandbox.

The package contains the template language, its limits and the built-in templates. It must not depend on tokens or
masks. Start with `chat_template.py`. `sandbox.py` restricts untrusted template code.
"""
