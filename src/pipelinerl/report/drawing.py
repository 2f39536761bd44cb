"""Functions shared by all figures: lines, points, axes, and conversion to PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelinerl.report.series import HeldOut

MANY_POINTS = 40
"""Lines with more points than this are drawn without markers."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches, at 110 dots per inch."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def png_of(figure: Figure) -> bytes:
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def line(axes: Any, x: Sequence[float], y: Sequence[float], label: str | None = None, **style: Any) -> None:
    """Draw a line; NaN leaves a gap. Draws nothing if all values are NaN."""
    if not all(math.isnan(value) for value in y):
        marker = "o" if len(x) <= MANY_POINTS else None
        axes.plot(x, y, **{"label": label, "linewidth": 1.5, "marker": marker, "markersize": 3} | style)


def points(
    axes: Any, found: Sequence[tuple[float, HeldOut]], label: str | None = None, *, spans: bool = False, **style: Any
) -> None:
    """Draw evaluations, given as (x, evaluation), with standard errors and, if `spans`, their ranges of versions."""
    if found:
        x = [position for position, _ in found]
        ranges = [[position - one.oldest for position, one in found], [one.newest - position for position, one in found]]
        axes.errorbar(
            x,
            [one.reward for _, one in found],
            yerr=[one.standard_error for _, one in found],
            xerr=ranges if spans else None,
            **{"label": label, "fmt": "D--", "markersize": 4, "linewidth": 1, "capsize": 3, "zorder": 3} | style,
        )


def finish_axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """Set titles and grid, and a legend if there is more than one label."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)
