"""Inference: prompts, generation, streaming, losses and chat with a loaded model, in torch or llama.cpp.

It loads a model with its adapter and tokenizer; it knows nothing about runs or training. Start with `chat_model.py`
(`open_chat_model`), then `runtime.py` (the `Runtime` interface) and `generate.py`.
"""
