"""Hugging Face models as the stages need them: loading, weights by name, packed forwards, conversion. The bottom of torch."""
