"""Tokenizers: load the tokenizer of any model without torch and transformers, with the same ids.

The package owns the three file formats: `tokenizer.json` (`hub.py`), SentencePiece (`sentencepiece.py`) and GGUF
(`gguf.py`). It must not know about conversations or corpora. Start reading with `load.py`.
"""
