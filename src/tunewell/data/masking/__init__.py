"""Loss masks: find exactly which characters of a rendered conversation are supervised, for any chat template.

The package uses placeholders for message texts. It must not depend on tokens: `encoding` turns its plans into ids and a
mask. Start with `masker.py`.

Searching the rendered text for a header such as `<|im_start|>assistant` is not reliable: templates trim, merge and
rewrite, and a reply can quote the header. Instead, the template renders the conversation with placeholders for the
message texts:

    real          <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
    placeholders  <|im_start|>user\\nZq0wXv<|im_end|>\\n<|im_start|>assistant\\nZq1wXv<|im_end|>\\n
    supervised                                                             ^^^^^^^^^^^^^^^^

1. The rendering with placeholders separates the text that the template writes from the positions of the messages.
2. A second rendering, with placeholders surrounded by white space, shows what the template trims.
3. If the row has tools or tool calls, a third rendering with redacted tool calls shows which text belongs to which
   message.
4. The result is a plan, cached by the shape of the conversation: its roles, fields and tools, without the texts.
5. For every row, the real rendering must equal the plan filled with the texts of the row. If it does not, the template
   changes texts in a way that the plan cannot represent, and the row is dropped as `mask_uncertain`.

Step 5 makes the mask exact: it needs no assumption about the template, and no row is trained on a guess.
"""
