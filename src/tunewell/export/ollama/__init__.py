"""Ollama: a Modelfile whose Go template is derived from the model's Jinja chat template.

`probes` renders conversations and cuts the text, `layout` learns rules from the pieces, `template` compares them with
the original, `go_syntax` writes Go, `modelfile` the file. No template is known by name. Start with `template.py`.
"""
