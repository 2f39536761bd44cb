"""Weight hand-over from the trainer to the engines: whole updates, with versions, checksums and receipts.

`memory` is for one process, `shared` between processes. The launcher, which does without torch, makes the shared file
with `shared_file`.
"""
