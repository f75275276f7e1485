"""Retrieval: documents become passages, passages an index, and a model answers from what a search finds.

Owns reading documents, cutting passages, embedding, stores and search. It knows nothing of training and of screens.
Start with `documents.py`, `passages.py` and `search.py`; `stores/base.py` is the extension point.
"""
