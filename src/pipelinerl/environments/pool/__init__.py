"""Functions that may be slow, crash or run wild, in processes of their own: see `pool.FunctionPool`.

Nothing is imported here, as these processes should start fast.
"""
