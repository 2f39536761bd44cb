"""A discrete-event simulation of a run: the real schedule, with costs in time instead of computation.

scenario.py  inputs: costs, workloads, from a calibration or a run    engine.py   decode steps of an engine, many at once
run.py       the event loop, and the prediction                       trainer.py  stream, batches, optimizer steps, lag
"""
