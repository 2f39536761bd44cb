"""Asks environments for rollouts, keeps the engine full of them, and hands finished groups on."""

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.client import EngineClient, RolloutClient
from pipelinerl.actor.evaluation import EvaluatedProblem, Evaluation

__all__ = ["Actor", "EngineClient", "EvaluatedProblem", "Evaluation", "RolloutClient"]
