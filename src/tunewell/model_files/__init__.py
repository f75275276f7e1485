"""What lies in a model's files, without torch: facts, GGUF headers, presets, Ollama blobs, the catalogue."""
