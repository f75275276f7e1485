"""Whether a chat template begins the reply that it asks for."""

from tunewell.data.templates import TemplateFailed
from tunewell.exporting.chat_layout import Render
from tunewell.exporting.chat_probes import saying

_SAID = "an answer"


def missing_opening(render: Render) -> str:
    """Give what a template writes before a reply and does not write where one is asked for; empty where all is well.

        asked     <|im_start|>user\\nHello<|im_end|>\\n
        answered  <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nan answer<|im_end|>\\n
                                                         ^^^^^^^^^^^^^^^^^^^^^^  missing

    A template may ignore `add_generation_prompt` all the same: in `[INST] Hello [/INST]` the question's end begins the
    reply. White space alone is left to models by many templates.
    """
    asked = saying(("user",), "user", "Hello")
    try:
        plain, prompt = render(asked, False), render(asked, True)
        whole = render([*asked, {"role": "assistant", "content": _SAID}], False)
    except TemplateFailed:
        return ""
    before, found, _ = whole.rpartition(_SAID)
    if plain != prompt or not found or before.rstrip() == prompt.rstrip():
        return ""
    return before.removeprefix(prompt)
