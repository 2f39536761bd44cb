"""The embedded engine as an HTTP server: OpenAI's API, our own lossless API, and weight updates in flight.

`served` runs the engine in a thread and knows no HTTP; the endpoints (`app`, `openai`, `dialects`) follow its generations.
Needs the extra `serve`.
"""
