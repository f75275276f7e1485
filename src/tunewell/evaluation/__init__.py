"""Evaluate a trained model on held-out rows beside its base model, and give a verdict: PASS, WEAK or FAIL.

Owns the evaluation session, scores of answers, faults of answers, metric functions, the verdict with its reasons, the
comparison of two runs, and the report as JSON, Markdown and HTML. It must not train, write checkpoints or print.

Start reading in `session.py`; `verdict.py` shows how measurements become a verdict.
"""
