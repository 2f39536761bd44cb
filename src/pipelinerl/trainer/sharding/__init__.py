"""A trainer of several processes (`trainer.ranks`): `ranks` forms the group, `learner` divides a step and computes."""
