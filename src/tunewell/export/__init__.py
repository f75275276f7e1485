"""Export: write a trained model for PEFT, transformers, llama.cpp and Ollama, and verify every file against the model.

Contains the export targets, the GGUF writer, the Ollama template converter and the verification. Training and terminal
output belong to other packages. Start with `targets/base.py` (the target protocol), `staging.py` (the output folder)
and `prove.py` (the verification). `workflows/export.py` runs them in order.
"""
