"""`train --dry-run`: what can be checked without the model's weights."""

from __future__ import annotations

from pipelinerl.config.schema import RunConfig
from pipelinerl.launch.checks import check_without_running, settled
from pipelinerl.launch.trial import try_environment
from pipelinerl.resources.memory import on_gpus

SHOWN_CHARACTERS = 80


def dry_run(config: RunConfig) -> list[str]:
    """Check everything that can be checked without the model's weights. Returns the report, as lines of text.

    Raises the error that the run would end with: UserError for settings, models and environments that can't be used.
    """
    config, chosen = settled(config)
    memory, placement, report = check_without_running(config), _placement(config), try_environment(config)
    tokens, prompt = report.prompt_tokens, report.prompt
    longest = f", {min(tokens)} to {max(tokens)} in the first {len(tokens)} problems" if len(tokens) > 1 else ""
    shown = prompt if len(prompt) <= SHOWN_CHARACTERS else f"{prompt[:SHOWN_CHARACTERS]}..."
    metrics = "".join(f", {name} {value:g}" for name, value in report.metrics.items())
    lines = [
        *(*chosen, *placement, *memory.report(), *report.notes),
        f"environment: {config.environment.kind} was built in {report.built_s:.1f} s",
        f"  the first prompt has {tokens[0]} tokens{longest}: {shown!r}",
        f"  an empty answer to it gets reward {report.reward:g}{metrics}",
        *(f"warning: {warning}" for warning in report.warnings),
    ]
    if config.evaluation.problems:
        lines.append(f"  {report.held_out} held-out problems (evaluation.problems: {config.evaluation.problems})")
    return lines


def _placement(config: RunConfig) -> list[str]:
    """Where the processes of a run on several machines, or on GPUs of this one, would be started."""
    if config.launch.kind == "embedded" or (config.launch.kind == "processes" and not on_gpus(config)):
        return []
    from pipelinerl.resources.placement import place_here, placement_lines  # noqa: PLC0415 - few runs need it

    if config.launch.kind == "processes":
        places, here = place_here(config)
        return placement_lines(places, [here])
    from pipelinerl.launch.hosts.ray import connected, placement_of  # noqa: PLC0415 - an extra

    with connected(config.launch) as cluster:
        return placement_lines(placement_of(config, cluster), cluster.machines)
