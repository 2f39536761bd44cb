"""The embedded engine as an HTTP server: OpenAI's API, our own lossless API, and weight updates in flight.

`served` runs the engine in a thread and knows no HTTP; the endpoints (`service`, `endpoints`) follow its requests.
Needs the extra `serve`.
"""
