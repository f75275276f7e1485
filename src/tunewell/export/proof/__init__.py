"""The proof that files are the trained model: a reference made before the export, and checks of the files against it.

`reference` records the trained model, `checks` compares text and logits, `sketch` and `tensors` the weights;
`transformers`, `gguf` and `modelfile` load the artefacts. It does not know the writers. Start with `checks.py`.
"""
