"""The embedded engine as an HTTP server: OpenAI's API, our own lossless one, and weight updates in flight.

`engine_thread` knows nothing of HTTP and the endpoints know nothing of the engine: they meet in `exchange`. Needs the
extra `serve`.
"""
