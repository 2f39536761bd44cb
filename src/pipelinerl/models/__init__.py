"""Hugging Face models as the stages need them: loading, attention, packed forwards, weights by name, conversion."""
