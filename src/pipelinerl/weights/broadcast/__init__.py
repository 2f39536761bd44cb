"""Weight transfer by a `torch.distributed` broadcast to several engines, on this machine or on others.

    sender:    copy the tensors into a flat buffer (`send` returns), announce the update, wait until every receiver is
               ready, broadcast the buffer in buckets; wait for the receipts before the next update
    receiver:  get ready, receive into a buffer and verify its checksum while the engine decodes; only then does `poll`
               return the update; later send the receipt

The launcher creates the sender's socket with `control.listen`.

Engine servers receive in the process that computes. The process that sends requests to them then has a
`CollectiveWeightCoordinator`. It is told when all servers have an update, and offers it to its engine, which makes the
servers apply it (over HTTP: `serving.client`). One receipt answers for all servers.

Besides the broadcast there is a TCP connection from each receiver to the sender (`control`): Hello, then Form (the group),
and for each update Offer, Ready, Go, Staged, Answer (to a coordinator Arrived, and from it the Answer). Both also send
heartbeats, so that a stopped process can be told from an idle one. A receiver that dies is reported at once, one that is
silent after `stall_s`. The others are told, discard the unfinished update, and keep their weights. A broken group is not
repaired: the run ends with the error, and the next run creates a new sender.

Tensors are sent as bytes, descriptions as JSON. Nothing that is received is executed. The connections are neither encrypted
nor authenticated, as those of `torch.distributed` are not: across machines, use a trusted network.
"""
