"""Ollama: a Modelfile whose Go template is derived from the model's Jinja chat template.

`probes` renders conversations of markers, `layout` learns rules from the text between them and writes Go, `template`
compares the rules with the original, `modelfile` writes the file. No template is known by name. Start with
`template.py`.
"""
