"""Weight transfer from the trainer to the engines: whole updates, with versions, checksums and receipts.

`memory` transfers within one process, `shared` between processes, `broadcast` between machines; `delta` encodes what has
changed since the previous update. `shared.file` does not import torch, so that the launcher
can create the shared file without it.
"""
