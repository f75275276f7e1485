"""Opened models: prompts, generation, streaming, losses and chat, in torch or in llama.cpp.

Knows how to load a model with its adapter and tokenizer, but neither runs nor training. Start with `chat_model.py`
(`open_chat_model`), then `runtime.py` (the `Runtime` interface) and `generate.py`.
"""
