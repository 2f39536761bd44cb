"""Weight transfer by a `torch.distributed` broadcast to several engines, on this machine or on others.

The sender (the trainer's process) has one connection with each member (`control`): with every receiver, which has an
engine, and with the coordinator, if there is one. The connections carry small messages; the weights themselves go through
a group of gloo or nccl (`group`), which is formed once. The launcher creates the sender's socket with `channel.listen`. For
each update:

    sender                                              receivers
    copies the tensors into a flat buffer; `send`
    returns here
    Offer to all members; the broadcast             -> receive into a buffer, in buckets, and verify the checksum, while the
                                                        engine decodes: Report staged
    waits for all; Apply                            -> only now does `poll` return the update. The engine copies it between
                                                        two tokens, and echoes the checksum of what it holds: Answer
    waits for all answers before the next update; a
    wrong one ends the run

The sender may broadcast a delta (`weights.delta`) from the previous update, which all receivers hold. They apply it to their
buffer and verify the checksum of all weights. Engines see no difference.

Engine servers receive in the process that computes. The process that sends requests to them is then the coordinator. Apply
is for it alone: it offers the update (without tensors) to its engine, which makes the servers apply what they have staged
(over HTTP: `serving.client`), and its Answer is for all of them.

Whole or not at all: an engine's weights change only after Apply, so only if every receiver has staged all of it. After
a crash at any point, each engine holds its old or its new weights.

Who waits for what, and for how long:

    sender     all members have connected              `join_timeout_s`
    receiver   the sender, and then the other members  `join_timeout_s`
    all        the group is formed; a bucket arrives   2 `stall_s`
    sender     all have staged                         2 `stall_s`
    sender     all have answered                       `timeout_s`
    sender     a member that sends no heartbeat        `stall_s`; one whose process has ended: no wait, its connection ends
    receiver   the next update                         until the sender closes

Any failure ends the transfer: the error names the members that were waited for, and everybody gets it (Close). A receiver
discards the unfinished update, and its engine keeps its weights. A lost member (BroadcastEndedError) ends the session of the
run; the next one has a new sender, with a new key.

Tensors are sent as bytes, messages as JSON. Nothing that is received is executed or unpickled. Both ends of a connection
prove that they have the key of the broadcast, a random one for each session of a run, before anything else is read.
Nothing is encrypted, and the ports of gloo and nccl, which have only the checksums to protect them, are open to the
network of the address that the sender listens at: loopback unless servers are remote, and then use a trusted network.
"""
