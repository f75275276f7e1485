"""Training: the loop that takes optimizer steps, evaluates, saves checkpoints and recovers from bad steps.

Owns steps, optimizers, checkpoints, health rules and distributed training. It knows nothing about run folders beyond
the files it is given, and nothing about screens: it sends events (`events.py`) to a listener.

Start with `engine.py` (the loop), then `step.py` (one step), `optimizers/base.py` and `memory.py` (out of memory).
Bad steps: `health.py` (rules) -> `recovery.py` (decisions) -> `healing.py` (applies them).
"""
