"""The hub: one object in the launcher's process owns the state of a session.

    generation ─ claims, groups ─▶ ┌─────┐ ─ groups ─▶ preprocessor, trainer
    all stages ─ statuses ───────▶ │ hub │ ─ statuses, grants ─▶ those who decide by them
                                   └─────┘ ─▶ rollouts.jsonl, streams/

`admission` has the decisions, without I/O and clock. `hub` has the methods, and writes what must outlive the launcher:
records, and the `stream` of groups. Workers call them directly (`Direct`, in one process) or over one connection each
(`server`, `client`). Nothing in a decode step or an optimizer step waits for an answer: grants are asked for ahead, groups
and statuses are sent, and the trainer's progress is pushed to those who need it. A worker that dies is a closed connection.
"""
