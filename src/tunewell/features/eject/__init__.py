"""Write a run as a script for transformers, PEFT and TRL, which runs without tunewell.

Start with `workflow.py`; `page/train.py.jinja` is the script.
"""
