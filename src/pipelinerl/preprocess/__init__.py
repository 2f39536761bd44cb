"""Turns finished groups into training samples: advantages, joined turns, filters with counts."""

from __future__ import annotations

from pipelinerl.preprocess.preprocessor import Preprocessor, ReferenceScorer, newest_version
from pipelinerl.preprocess.stage import PreparingReader, PreprocessorStage

__all__ = [
    "PreparingReader",
    "Preprocessor",
    "PreprocessorStage",
    "ReferenceScorer",
    "newest_version",
]
