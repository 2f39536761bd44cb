"""The run file: its schema, loading it with command-line flags on top, checking it, and printing it with its docs.

Imports neither torch nor transformers, so that a mistake in a run file is reported at once.
"""
