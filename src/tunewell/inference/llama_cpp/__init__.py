"""llama.cpp via ctypes: find a library (`library.py`), bind it (`bindings.py`), open a GGUF file (`model.py`).

`runtime.py` implements the `Runtime` interface. docs/decisions/0031-llama-cpp-abi.md explains the assumptions about the
ABI.
"""
