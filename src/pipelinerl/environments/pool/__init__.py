"""Runs user functions that may be slow or crash in separate processes: see `pool.FunctionPool`.

This module imports nothing, so that the worker processes start fast.
"""
