"""Compare runs and models, with and without documents, on the same held-out questions."""
