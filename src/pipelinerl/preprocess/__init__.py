"""Turns finished groups into training samples: advantages, joined turns, filters with counts."""

from pipelinerl.preprocess.preprocessor import Preprocessor, PreprocessorStage, ReferenceScorer, newest_version

__all__ = ["Preprocessor", "PreprocessorStage", "ReferenceScorer", "newest_version"]
