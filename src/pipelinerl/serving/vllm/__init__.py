"""vLLM as an engine: starts its servers, sends them requests, and updates their weights in flight."""
