"""The GGUF writer: convert a model folder in transformers format to one file for llama.cpp.

`architecture` converts `config.json`, `tokenizer` the vocabulary and `weights` the tensors. `quantize` chooses the
tensor types, and `write` writes the file. Adapters must be merged first. Start with `write.py`.
"""
