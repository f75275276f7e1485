"""Find the task of the rows, and score answers by its measure. No torch.

A task is the kind of answer that the rows teach: a label, a number, JSON, a command, a fact, a text. Each task has one
scorer, which decides whether an answer is right. A scorer must not know models, verdicts or files.

Start with `base.py` for the protocol, and `tasks.py` for how the task is found; `judge.py` and `answer_keys.py` are the
scorer of facts.
"""
