"""Weight transfer between processes, through a file in shared memory (see `file` for its layout).

    sender:    wait until every receiver has acknowledged update n-1, fill buffer n % 2, then publish it in one write
    receiver:  see the new update, verify the buffer's checksum, return views of it; later write the acknowledgement

So no receiver sees a partial update, and the views of update n do not change until update n+1 is acknowledged.
"""
