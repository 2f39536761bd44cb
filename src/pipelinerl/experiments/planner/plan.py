"""The plan: the best pipeline and the best conventional RL at equal lag, and throughput against lag."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.analytic import Conventional, Pipeline
from pipelinerl.experiments.planner.question import Question
from pipelinerl.experiments.planner.search import Comparison, PipelineGrid, compare

CURVE_POINTS = 48


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`chosen` compares both methods at the requested lag, `curve` at lags up to four times that (at least 8), ascending."""

    question: Question
    chosen: Comparison
    curve: tuple[Comparison, ...]


def make_plan(question: Question) -> Plan:
    """Search all configurations. Raises UserError, with the reason, if no pipeline is possible."""
    workload = question.workload
    if workload.accelerators < 2:
        raise UserError("a pipeline needs at least 2 accelerators, one to generate and one to train: --accelerators 2")
    max_lag = question.max_lag
    if max_lag is None:
        fastest = PipelineGrid.of(workload).best()
        max_lag = fastest.max_lag if fastest else 0
    lags = np.unique(np.geomspace(1, max(8, 4 * max_lag), CURVE_POINTS).round().astype(int)).tolist()
    curve = compare(workload, sorted({*lags, *_doublings(lags[-1]), max_lag}), baseline=question.baseline)
    chosen = next(comparison for comparison in curve if comparison.max_lag == max_lag)
    if chosen.pipeline is None:
        lowest = min((c.max_lag for c in curve if c.pipeline), default=None)
        hint = f"; there is one at --max-lag {lowest}" if lowest is not None else ""
        raise UserError(f"no pipeline has a lag of at most {max_lag}{hint}")
    return Plan(question=question, chosen=chosen, curve=tuple(curve))


def tabulated(plan: Plan) -> list[Comparison]:
    """The points of the curve to print: lags that are powers of two, and the requested lag."""
    doublings = {*_doublings(plan.curve[-1].max_lag), plan.chosen.max_lag}
    return [comparison for comparison in plan.curve if comparison.max_lag in doublings]


def plan_json(plan: Plan) -> bytes:
    """Inputs and results as JSON. Rates are in tokens per `unit`."""
    question = plan.question
    workload = question.workload
    return msgspec.json.format(
        msgspec.json.encode(
            {
                "unit": workload.utilisation.unit,
                "tokens_per_s_of_a_token_per_unit": question.tokens_per_s,
                "accelerators": workload.accelerators,
                "batch_size": workload.batch_size,
                "length_mean": workload.lengths.mean,
                "length_max": workload.lengths.longest,
                "utilisation": {
                    "active": workload.utilisation.active,
                    "step_times": workload.utilisation.step_times,
                    "source": workload.utilisation.source,
                },
                "tau": workload.tau,
                "chosen": _comparison(plan.chosen),
                "throughput_by_max_lag": [_comparison(comparison) for comparison in plan.curve],
            }
        ),
        indent=1,
    )


def _comparison(comparison: Comparison) -> dict[str, object]:
    return {
        "max_lag": comparison.max_lag,
        "pipeline": _numbers(comparison.pipeline) if comparison.pipeline else None,
        "conventional": _numbers(comparison.conventional),
        "speed_up": comparison.speed_up,
    }


def _numbers(method: Pipeline | Conventional) -> dict[str, object]:
    return {
        **({"slots": method.slots, "generating": method.generating} if isinstance(method, Pipeline) else {}),
        **({"steps_per_round": method.steps_per_round} if isinstance(method, Conventional) else {}),
        "generation_rate": method.generation_rate,
        "training_rate": method.training_rate,
        "rate": method.rate,
        "max_lag": method.max_lag,
    }


def _doublings(largest: int) -> list[int]:
    return [2**power for power in range(largest.bit_length()) if 2**power <= largest]
