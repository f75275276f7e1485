"""Verification of an export: record the trained model before the export, and compare the files with this reference.

`reference` records the trained model, `checks` compares text and logits, and `tensors` compares weights. `transformers`
and `gguf` load the artefacts. The export targets call this package, not the other way round. Start with `checks.py`.
"""
