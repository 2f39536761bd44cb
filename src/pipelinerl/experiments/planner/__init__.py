"""Predicting a run before running it: the paper's formulas, a calibration of the machine, and a simulation.

calibration.py  lengths, U(h) and costs, measured by a short run and by decode steps of an engine alone
    ▲
paper.py        the formulas of Appendix A, and the paper's case study
scenario.py     what is simulated: costs and work, from a calibration or a run; and an engine's decode steps, many at once
    ▲
simulate.py     batches, optimizer steps and lag, the event loop and the prediction
"""
