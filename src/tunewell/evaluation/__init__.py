"""Evaluate a trained model and its base model on held-out rows, and return a verdict: PASS, WEAK, FAIL or UNPROVEN.

Contains the evaluation session, the scores and faults of answers, metric functions, the verdict with its reasons, the
comparison of two runs, and the report as JSON, Markdown and HTML. It must not train, write checkpoints or print.

Start with `session.py`; `verdict.py` derives the verdict from the measurements.
"""
