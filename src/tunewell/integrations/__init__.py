"""Integrations with other software: Hugging Face trainers, the OpenAI chat API and Colab notebooks.

Contains the adapters between tunewell and other programs. It must not import the command line or the workflows.

Start with `hf_callback/callback.py` (HealthCallback for transformers, TRL and Unsloth) or `openai_server/server.py`.
"""
