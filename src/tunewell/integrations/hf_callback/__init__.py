"""HealthCallback for `transformers.Trainer`, TRL and Unsloth: stop at the first update that is not finite.

Uses the health rules of `training` on numbers that hooks record in another trainer. Start with `callback.py`; then
`signals.py` (hooks, locating a fault) and `logs.py` (`events.jsonl`, `healing.jsonl`).
"""
