"""A demonstration: real rows, a small model and a verdict in about two minutes on two cores."""
