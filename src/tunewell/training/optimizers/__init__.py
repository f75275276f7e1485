"""Optimizers: one file per optimizer, each a subclass of `Optimizer` in `base.py`.

Owns the update of the trainable parameters and the optimizer state. It knows nothing about data, loss or checkpoints.
Start with `base.py`; `adamw.py` is the example to copy.
"""
