"""The embedded engine as an HTTP server: OpenAI's API, our own lossless API, and weight updates in flight.

`engine_thread` is independent of HTTP, and the endpoints are independent of the engine; `exchange` connects them. Needs the
extra `serve`.
"""
