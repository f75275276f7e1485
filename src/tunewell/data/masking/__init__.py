"""Loss masks: find which characters of a rendered conversation are supervised, exactly, for any chat template.

The package owns the placeholder trick. It must not know about tokens: `encoding` turns its plans into ids and a mask.
Start reading with `masker.py`.

Searching the rendered text for a header such as `<|im_start|>assistant` is not reliable: templates trim, merge and
rewrite, and a reply can quote the header. Instead, the template renders the conversation with placeholders for the
message texts:

    real          <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
    placeholders  <|im_start|>user\\nZq0wXv<|im_end|>\\n<|im_start|>assistant\\nZq1wXv<|im_end|>\\n
    supervised                                                             ^^^^^^^^^^^^^^^^

1. The rendering with placeholders separates the text that the template writes from the positions of the messages.
2. A second rendering, with placeholders in white space, shows what the template trims.
3. Where the row has tools or tool calls, a third rendering with redacted tool calls shows whose text is whose.
4. The result is a plan, cached by the shape of the conversation: its roles, fields and tools, without the texts.
5. For every row, the real rendering must equal the plan filled with the texts of the row. If it does not, the template
   changes texts in a way that the plan cannot follow, and the row is dropped as `mask_uncertain`.

Step 5 makes the mask exact: no assumption about the template is needed, and no row is trained on a guess.
"""
