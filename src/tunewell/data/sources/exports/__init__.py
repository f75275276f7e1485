"""Files in which conversations are trees or streams of messages: OpenAssistant, ChatGPT, Claude, Telegram, WhatsApp.

Each module reads one format: `read(file, options)` yields numbered conversations. `FORMATS` in `config/extensions.py`
lists them with the pattern by which a file is recognised. No module is imported unless a file of its format is read.
"""
