"""A trainer of several processes (`trainer.ranks`): `ranks` forms the group, `learner` computes, `plan` divides a step."""
