"""Features beside the spine: a folder has all of one, and can be deleted with its entry in `core/features.toml`."""
