"""A trainer of several processes (`trainer.ranks`): `plan` divides a step, `ranks` connects, `learner` computes.

With one process, nothing of this package is imported.
"""
