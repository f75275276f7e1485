"""Training methods (LoRA, full fine-tuning): select the trainable parameters, and save, restore and merge them.

Start with `base.py` (the `Method` interface), then `lora.py`. `targets.py` selects layers by name and `peft_format.py`
reads and writes PEFT's adapter files. The names of all methods are in `config/extensions.py`.
A method knows only the model. It knows nothing about optimizers, batches or run folders.
"""
