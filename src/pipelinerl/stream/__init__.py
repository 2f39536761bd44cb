"""Streams: ordered queues of encoded items between stages. The hub has both ends.

memory    within the launcher's process
files     in the run directory, so that a resumed run finds what was not trained on
redis     the same in a Redis server
"""
