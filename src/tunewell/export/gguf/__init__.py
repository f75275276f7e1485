"""The GGUF writer: a model folder in transformers format becomes one file that llama.cpp loads.

`architecture` reads `config.json`, `tokenizer` the vocabulary, `weights` the tensors; `write` writes the file, and
`quantize` stores a file in fewer bits. It knows nothing of adapters and of the proof. Start with `write.py`.
"""
