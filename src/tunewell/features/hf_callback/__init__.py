"""HealthCallback for `transformers.Trainer`, TRL and Unsloth: stop before the first update that is NaN or infinite.

Applies the health rules of `training` to losses and gradients that hooks record in another trainer. Start with
`callback.py`, then `signals.py` (hooks, fault location) and `logs.py` (`events.jsonl`, `healing.jsonl`).
"""
