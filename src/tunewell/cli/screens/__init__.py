"""The larger screens of the commands: training panel, log lines, loss curve, verdict, export verification, chat.

Screens convert records and events to text. Start with `training.py` for a run in progress and `train_result.py` for a
finished one.
"""
