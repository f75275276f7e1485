"""Texts at which generation is to stop, found in what a model's template writes after a reply."""

import re
from collections.abc import Collection

from tunewell.exporting.go_template import GoTemplate


def stop_texts(template: GoTemplate, *, control_tokens: Collection[str]) -> tuple[str, ...]:
    """List what ends a reply or would begin another turn, what ends it first.

    Control tokens between a reply and the next question, for these never stand in a reply. Where there are none, the
    text itself that follows a reply: `\\n\\nUser:`, say. Empty where the template writes nothing after a reply.

        Yes. <|eot_id|><|start_header_id|>user<|end_header_id|>\\n\\n     three control tokens
        Yes. \\n\\n### Instruction:\\n                                      none: the text up to its last line end
    """
    following = template.closing + template.next_question
    # Longer ones first, so that a token is not found inside another.
    tokens = sorted((token for token in control_tokens if token.strip()), key=len, reverse=True)
    if tokens and (found := re.findall("|".join(map(re.escape, tokens)), following)):
        return tuple(dict.fromkeys(found))
    for text in (template.closing, template.next_question):
        if text.strip():
            # A line end at the very end may be one token with what follows it, and would then never be seen.
            return (text.rstrip(),)
    return ()
