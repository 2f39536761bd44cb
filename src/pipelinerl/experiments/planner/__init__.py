"""Predicting a run before running it: the paper's formulas, a calibration of the machine, and a simulation.

paper.py        the formulas of Appendix A, and the paper's case study
calibration.py  lengths, U(h) and measured costs, as JSON
    ▲
calibrate.py    measures: a short run, and decode steps of an engine alone
scenario.py     what is simulated: costs, workloads, from a calibration or a run
simulate.py     the event loop and the prediction: engine.py (decode steps, many at once), trainer.py (batches, steps, lag)
"""
