"""Weight transfer by a `torch.distributed` broadcast to several engines, on this machine or on others.

The sender (the trainer's process) has one connection with each member (`control`): with every receiver, which has an
engine, and with the coordinator, if there is one. The connections carry small messages; the weights themselves go through
a group of gloo or nccl (`group`). The launcher creates the sender's socket with `channel.listen`. For each update:

    sender                                              receivers
    copies the tensors into a flat buffer; `send`
    returns here
    Offer to all members                             -> have memory: Report ready
    waits for all; Go receive                        -> receive into a buffer, in buckets, and verify the checksum, while the
                                                        engine decodes: Report staged
    waits for all; Go apply                          -> only now does `poll` return the update. The engine copies it between
                                                        two tokens, and echoes the checksum of what it holds: Answer
    waits for all answers before the next update; a
    wrong one ends the run

Deltas (`weights.delta`). The sender keeps a copy of the previous update, and its thread encodes what differs. The Offer
names the checksum of that base. A receiver that does not hold the base says so before it is ready (Report full), and the
sender then broadcasts all weights; otherwise it broadcasts the delta. Receivers apply it to their buffer, which still holds
the base, and verify the checksum of the whole buffer. If that is wrong at any receiver (Report full instead of staged), Go
receive is sent again, and all receive all weights. The first and every k-th update have no delta, and one that is not
shorter than all weights is not sent. Engines see no difference.

Engine servers receive in the process that computes. The process that sends requests to them is then the coordinator. Go
apply is for it alone: it offers the update (without tensors) to its engine, which makes the servers apply what they have
staged (over HTTP: `serving.client`), and its Answer is for all of them.

Groups. The first one has all members. If the sender `regroups`, a member that is lost later (its process died, it is silent,
its connection broke) only leaves the group: training goes on, and updates go to those that are left, in a new group. A
member that connects, for the first time or again, joins by a new group as well, which begins with the last update:

    a member is lost                  the unfinished update is discarded by all; nobody waits for the lost member
    an update is due, or somebody     Close (again) to all of the group, which connect again; Form to all that are connected;
    has connected                     the last update, whole, under a new number

An engine that has applied this update before is not told again; its receiver acknowledges it. If nobody is left, the sender
keeps the newest weights until somebody connects.

Whole or not at all: an engine's weights change only after Go apply, so only if every receiver has staged the whole
update. After a crash at any point, each engine holds its old or its new weights. An update belongs to the connection that
offered it: a new sender has a new key, and a number that was not offered is refused.

Who waits for what, and for how long:

    sender     all members have connected              `join_timeout_s`
    receiver   the sender, and then the other members  `join_timeout_s`
    all        the group is formed; a bucket arrives   2 `stall_s`
    sender     all are ready; all have staged          2 `stall_s`; after a refused delta once more
    sender     all have answered                       `timeout_s`
    sender     a member that sends no heartbeat        `stall_s`; one whose process has ended: no wait, its connection ends
    sender     members that connect again              `stall_s`; then the group is formed without them
    receiver   the next update, or the next group      until the sender closes, or it can't be reached for `join_timeout_s`

The error names the members that were waited for, and everybody gets it (Close). A receiver that fails discards the
unfinished update and keeps its weights. After an error the session of the run ends, and the next one creates a new sender,
with a new key, at the same socket if engines live on. They leave the old group (their receivers raise BroadcastEndedError)
and join the new one.

Tensors are sent as bytes, messages as JSON. Nothing that is received is executed or unpickled. Both ends of a connection
prove that they have the key of the broadcast, a random one for each session of a run, before anything else is read.
Nothing is encrypted, and the ports of gloo and nccl, which have only the checksums to protect them, are open to the
network of the address that the sender listens at: loopback unless servers are remote, and then use a trusted network.
"""
