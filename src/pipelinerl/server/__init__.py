"""The embedded engine behind HTTP: OpenAI's endpoints, and our own lossless ones."""
