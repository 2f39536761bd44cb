"""Studies on the saved weights of a run: how off-policy in-flight weight updates make the training data."""
