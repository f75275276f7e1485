"""Turn rows into packed tokens: sources, formats, chat templates, masks, tokenizers, corpus, batches. No torch.

rows/        parse, convert and clean single rows        templates/   render conversations
masking/     choose the supervised tokens                encoding/    tokenize
tokenizers/  load tokenizers                             sources/     open and read row files
corpus/      build and open a corpus                     batches.py   documents of each training step

The package does not depend on models or training. Start with `corpus/build.py`.
"""
