"""The larger screens of the commands: training panel, log lines, loss curve, verdict, export proof, chat.

Screens take records and events and return text; they compute nothing about a run. Start with `training.py` for a
running training and `train_result.py` for a finished one.
"""
