"""Weight hand-over by a broadcast of `torch.distributed` to several engines at once, on this machine or on others.

    sender:    copy the tensors into a flat buffer (`send` returns), offer the update, wait until every receiver is ready,
               broadcast the buffer in buckets; wait for the answers before the next update
    receiver:  get ready, receive into a buffer of its own and verify its checksum while the engine decodes; only then is
               there anything to `poll`; later send the answer

Whoever starts both makes the sender's socket with `collective_control.listen`.

Engine servers receive for themselves, in the very process that computes. Then a `CollectiveWeightCoordinator`, in the
process that hands out requests, is told when all of them have an update; it is offered there, they take it when they are
asked to (over HTTP: `remote`), and one answer is given for all.

Beside the broadcast there is a TCP connection from each receiver to the sender (`collective_control`): Hello, then Form
(the group), and for each update Offer, Ready, Go, Staged, Answer (to a coordinator Arrived, and from it the Answer). All
send a beat, too, so that one that was stopped is told from one that has nothing to say. A receiver that dies is named at
once, and one that is silent after `stall_s`; the others are told, drop what they have of the update, and keep the weights
they hold. A group that broke stays broken: the run ends with the error, and the next one makes a new sender.

Tensors are sent as bytes; descriptions are JSON. Nothing that is received is executed. The connections are neither encrypted
nor authenticated, as those of `torch.distributed` are not: across machines, use a network that is trusted.
"""

from pipelinerl.weights.broadcast.coordinator import CollectiveWeightCoordinator
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender

__all__ = ["CollectiveWeightCoordinator", "CollectiveWeightReceiver", "CollectiveWeightSender"]
