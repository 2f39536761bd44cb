"""Weight transfer by a `torch.distributed` broadcast to several receivers, on this machine or on others.

The receivers are the engines of generation processes, or engine servers. The sender (the trainer's process) tells generation
processes through the hub where they meet (`hub.wire.Meeting`); a process with servers sends these there over HTTP. All join
one store (`rendezvous`), whose keys carry what belongs to the group itself, and form a group of gloo or nccl (`group`) once:

    sender                                              receivers
                                                     <- Member: who they are, and on which GPU
    Form: the backend, once all are there            ->
    copies the tensors into a flat buffer; `send`
    returns here
    Incoming; the broadcast                          -> receive into a buffer, in buckets, and verify the checksum, while the
                                                        engine decodes: staged
    waits for all; Offer, through the hub            -> only now does `poll` return the update. The engine copies it between
                                                        two tokens, and echoes the checksum of what it holds: EngineAnswer
    waits for all answers before the next update; a
    wrong one ends the run

The sender may broadcast a delta (`weights.delta`) from the previous update, which all receivers hold. They apply it to their
buffer and verify the checksum of all weights. Engines see no difference.

Engine servers receive in the process that computes. The process that sends requests to them gets the offer, without tensors
(`receiving.Receiver`). Its engine makes the servers apply what they have staged (over HTTP), and its answer is for all of
them.

Whole or not at all: an engine's weights change only after the offer, so only if every receiver has staged all of it. After
a crash at any point, each engine holds its old or its new weights.

Every wait has a bound: `join_timeout_s` until all have joined, 2 `stall_s` until the group is formed or a bucket arrives,
`timeout_s` until engines have answered. Any failure ends the transfer, and with it the session; the error names the
receiver. A lost receiver (BroadcastEndedError) does so too; the next session has a new sender, with a new key.

Tensors are sent as bytes, messages as JSON. Nothing that is received is executed or unpickled. Both ends of a connection
prove that they have the key of the broadcast, a random one for each session of a run, before anything else is read.
Nothing is encrypted, and the ports of gloo and nccl, which have only the checksums to protect them, are open to the
network of the address that the sender listens at: loopback unless servers are remote, and then use a trusted network.
"""
