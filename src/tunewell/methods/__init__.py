"""Training methods: which parameters are trained, and how they are saved, restored and merged.

Start with `base.py` (the `Method` interface), then `lora.py`. `targets.py` selects layers by name and `peft_format.py`
reads and writes PEFT's adapter files. The names of all methods are in `config/extensions.py`.
A method knows the model only; it knows nothing about optimizers, batches or run folders.
"""
