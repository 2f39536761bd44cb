"""Evaluates models on held-out problems: mean@K and pass@k, with confidence intervals."""
