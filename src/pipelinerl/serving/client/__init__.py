"""The client: presents several engine servers, reached over HTTP, as one engine."""
