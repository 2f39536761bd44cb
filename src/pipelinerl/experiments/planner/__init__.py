"""Choosing a configuration before running it: an analytical model, a calibration of the machine, and a simulation.

lengths.py      distribution of lengths    ┐
utilisation.py  cost of decode steps, U(h) ├─▶ question.py ─▶ analytic.py ─▶ search.py ─▶ plan.py ─▶ table.py
calibration.py  measured costs, as JSON    ┘                  formulas       all (H, I), all G       text, figure
    ▲
calibrate.py    measures: production.py (a running actor), measure_generation.py, measure_training.py
simulation/     discrete-event simulation with the same costs
"""
