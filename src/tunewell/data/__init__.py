"""From rows to packed tokens: sources, formats, chat templates, masks, tokenizers, corpus, batches. No torch.

rows/        parse, convert and clean single rows        templates/   render conversations
masking/     which tokens are supervised                  encoding/    tokenize
tokenizers/  load tokenizers                              sources/     open and read row files
corpus/      build and open a corpus                      batches.py   documents of each training step

Knows no model and no training. Start with `corpus/build.py`.
"""
