"""Models: read a model's facts, load its weights from any source, and run it over packed documents.

Start with `facts.py` (sizes, without torch) and `load.py`; `packed_forward.py` is the forward pass that training and
evaluation share, over `attention.py` and `loss.py`. `support.py` decides which architectures can be trained.
The package knows nothing about training methods, optimizers or run folders.
"""
