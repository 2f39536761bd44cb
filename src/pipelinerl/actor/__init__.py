"""Runs environments' rollouts, keeps the engine full, and writes finished groups to the stream."""

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.client import EngineClient, RolloutClient
from pipelinerl.actor.evaluation import EvaluatedProblem, Evaluation

__all__ = ["Actor", "EngineClient", "EvaluatedProblem", "Evaluation", "RolloutClient"]
