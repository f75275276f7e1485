"""Tokenizers: load the tokenizer of any model without torch and transformers, with the same ids.

The package reads three file formats: `tokenizer.json` (`hub.py`), SentencePiece (`sentencepiece.py`) and GGUF
(`gguf.py`). It must not depend on conversations or corpora. Start with `load.py`.
"""
