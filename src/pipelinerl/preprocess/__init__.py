"""Turns finished groups into training samples: advantages, joined turns, filters with counts, packing."""

from __future__ import annotations

from pipelinerl.preprocess.advantages import advantages
from pipelinerl.preprocess.packing import pack
from pipelinerl.preprocess.preprocessor import Preprocessor, ReferenceScorer, newest_version
from pipelinerl.preprocess.stage import PreparingReader, PreprocessorStage
from pipelinerl.preprocess.turns import JoinedTurns, join_turns

__all__ = [
    "JoinedTurns",
    "PreparingReader",
    "Preprocessor",
    "PreprocessorStage",
    "ReferenceScorer",
    "advantages",
    "join_turns",
    "newest_version",
    "pack",
]
