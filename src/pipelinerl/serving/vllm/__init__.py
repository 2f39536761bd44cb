"""vLLM as an engine: its servers started, driven and given new weights in flight."""
