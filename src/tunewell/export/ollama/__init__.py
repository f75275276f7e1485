"""Ollama Modelfiles, with a Go template derived from the model's Jinja chat template.

`probes` renders test conversations, `layout` learns rules from the rendered text and writes them in Go, `template`
compares the rules with the original, and `modelfile` writes the file. There is no list of known templates. Start with
`template.py`.
"""
