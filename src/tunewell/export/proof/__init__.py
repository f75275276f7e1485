"""The proof that files are the trained model: a reference made before the export, and checks of the files against it.

`reference` records the trained model, `checks` compares text and logits, `tensors` the weights; `transformers` and
`gguf` load the artefacts. It does not know the export targets. Start with `checks.py`.
"""
