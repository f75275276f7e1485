"""The GGUF writer: a model folder in transformers format becomes one file that llama.cpp loads.

`architecture` reads `config.json`, `tokenizer` the vocabulary, `weights` the tensors; `quantize` chooses types of fewer
bits, and `write` writes the file. It knows nothing of adapters and of the proof. Start with `write.py`.
"""
