"""A run as a discrete-event simulation: the same schedule as the real actor and trainer, machines that only take time.

scenario.py   what it is given            run.py      events in order of time
workload.py   lengths, drawn or replayed  engine.py   an engine's decode steps, many at once
result.py     what it predicts            trainer.py  stream, batches, optimizer steps
measured.py   the same of a real run      lag.py      lag of every token
"""

from pipelinerl.experiments.planner.simulation.result import Prediction
from pipelinerl.experiments.planner.simulation.run import simulate
from pipelinerl.experiments.planner.simulation.scenario import Costs, GroupWork, Scenario, Workload
from pipelinerl.experiments.planner.simulation.workload import DrawnWorkload, ReplayedWorkload

__all__ = ["Costs", "DrawnWorkload", "GroupWork", "Prediction", "ReplayedWorkload", "Scenario", "Workload", "simulate"]
