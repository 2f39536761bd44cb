"""A discrete-event simulation of a run: the real schedule, with costs in time instead of computation.

scenario.py    inputs                                     run.py      the event loop
calibrated.py  a scenario from a run file and calibration engine.py   decode steps of an engine, many at once
workload.py    lengths, drawn or replayed                 trainer.py  stream, batches, optimizer steps
result.py      the prediction                             lag.py      lag of every token
recorded.py    workload and measurements of a real run    table.py    a prediction as text
"""

from pipelinerl.experiments.planner.simulation.result import Prediction
from pipelinerl.experiments.planner.simulation.run import simulate
from pipelinerl.experiments.planner.simulation.scenario import Costs, GroupWork, Scenario, Workload
from pipelinerl.experiments.planner.simulation.workload import DrawnWorkload, ReplayedWorkload

__all__ = ["Costs", "DrawnWorkload", "GroupWork", "Prediction", "ReplayedWorkload", "Scenario", "Workload", "simulate"]
