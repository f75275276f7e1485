"""Write the report of an evaluation: `page.py` as HTML, `markdown.py` for pull requests, both from `view.py`.

Everything here reads only `records.report.Report`; it needs neither a model nor torch.
"""
