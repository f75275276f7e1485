"""The report of an evaluation as HTML (`page.py`) and as Markdown for pull requests (`markdown.py`).

Both use `view.py`. This package reads only `records.report.Report` and needs neither a model nor torch.
"""
