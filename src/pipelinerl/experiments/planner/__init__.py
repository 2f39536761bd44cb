"""Choosing a configuration before running it: an analytical model, a calibration of the machine, and a simulation.

analytic.py     lengths, U(h), formulas ─▶ plan.py: inputs, all (H, I) and all G ─▶ table.py: text, figure
calibration.py  measured costs, as JSON
    ▲
calibrate.py    measures: measure_generation.py (an engine, a running actor) and measure_training.py (another process)
simulation/     discrete-event simulation with the same costs
"""
