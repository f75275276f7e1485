"""Connections to other software: Hugging Face trainers, the OpenAI chat API, Colab notebooks.

Owns the adapters between tunewell's interfaces and theirs. It must not know the command line or the workflows.

Start with `hf_callback/callback.py` (HealthCallback for transformers, TRL and Unsloth) or `openai_server/server.py`.
"""
