"""Object storage and web addresses: list, download, cache and upload files. No torch.

Owns addresses (`s3://`, `r2://`, `https://`), access keys, retries, resumed downloads, the cache of downloaded files
and the layout of pushed folders. It does not interpret files: `data` reads rows from them, `export` decides what is
pushed. Access keys are used for requests only. They are never part of an error, a record or a file.

Start with `store.py` (one bucket) and `fetch.py` (download into the cache).
"""
