"""Exports of trained models: files for PEFT, transformers, llama.cpp and Ollama, each proven to be the trained model.

Owns the export targets, the GGUF writer, Ollama's templates and the proof. It knows nothing of training and of screens.
Start with `targets/base.py` (the protocol of a target), `staging.py` (the output folder) and `prove.py` (the proof);
`workflows/export.py` puts them together.
"""
