"""Models: read a model's facts, load its weights from any source, and run it on packed documents.

Start with `facts.py` (sizes, without torch) and `load.py`. `packed_forward.py` is the forward pass of training and
evaluation; it uses `attention.py` and `loss.py`. `support.py` decides which architectures can be trained.
The package knows nothing about training methods, optimizers or run folders.
"""
