"""Features: one folder each, which can be deleted together with its entry in `core/features.toml`."""
