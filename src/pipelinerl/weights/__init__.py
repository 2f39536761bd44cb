"""Weight transfer from the trainer to the engines: whole updates, with versions, checksums and receipts.

    trainer    `Sender.send`: wait until all engines have answered, copy the tensors, offer the copies
    hub        Offer ──▶ engines, EngineAnswer ──▶ trainer (`hub.wire`); it also says which engines have come and gone
    engine     `Receiver.poll`: views of the copies, verified; `acknowledge`: the receipt

The tensors go another way: directly within one process, a file (`layout`) between processes of one machine, `broadcast`
between machines. `delta` encodes what has changed since the previous update.
"""
