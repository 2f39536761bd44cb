"""Turns finished groups into training samples: advantages, joined turns, filters with counts."""

from __future__ import annotations

from pipelinerl.preprocess.preprocessor import Preprocessor, ReferenceScorer, newest_version
from pipelinerl.preprocess.stage import PreprocessorStage

__all__ = [
    "Preprocessor",
    "PreprocessorStage",
    "ReferenceScorer",
    "newest_version",
]
