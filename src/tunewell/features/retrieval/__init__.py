"""Retrieval: index documents as passages, search them, and let a model answer from the passages.

Owns reading documents, cutting passages, embedding, stores and search. It does not import training or screens.
Start with `documents.py`, `passages.py` and `search.py`; `stores/base.py` is the extension point.
"""
