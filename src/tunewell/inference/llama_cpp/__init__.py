"""llama.cpp through ctypes: find a library (`library.py`), bind it (`bindings.py`), open a GGUF file (`model.py`).

`runtime.py` implements the `Runtime` interface on top of it. docs/decisions/0031-llama-cpp-abi.md explains how it
relies on the ABI.
"""
