"""Choosing a configuration before running it: the analytical model, what a machine's steps cost, and a simulation.

lengths.py      how long completions are        ┐
utilisation.py  what a decode step costs, U(h)  ├─▶ question.py ─▶ analytic.py ─▶ search.py ─▶ plan.py ─▶ table.py, figure.py
calibration.py  what was measured, as a file    ┘                  formulas       all (H, I), all G
    ▲
calibrate.py    measures: production.py (an actor at work), measure_generation.py, measure_training.py
simulation/     the same costs, event by event
"""
