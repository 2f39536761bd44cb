"""Turns finished groups into training samples: advantages, joined turns, filters with counts."""

from pipelinerl.preprocess.preprocessor import PreprocessorStage, newest_version, prepare

__all__ = ["PreprocessorStage", "newest_version", "prepare"]
