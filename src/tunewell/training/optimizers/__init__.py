"""Optimizers: one file for each, over the protocol in `base.py`.

Owns the update of the trainable parameters and its state. It knows nothing about data, the loss or checkpoints.
Start with `base.py`; `adamw.py` is the example to copy.
"""
