"""Hugging Face models: loading, attention, packed forwards, named weights, LoRA, conversion from GGUF."""
