"""The weights that a run saved, by version, and the versions followed by enough consecutive ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from torch import Tensor

from pipelinerl.checkpoint import load_checkpoint, saved_versions
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import named_weights

NAMED_STARTS = ("early", "middle", "late")


class SavedWeights:
    """Weights of a run by version, loaded lazily. The most recently used ones are cached, up to `kept_bytes` (at least two).

    Version 0 is the model that the run started from; the others are its checkpoints and saved weights.
    """

    def __init__(self, run_dir: Path, model: ModelConfig, *, kept_bytes: int = 2 << 30) -> None:
        self._run_dir = run_dir
        self._model = model
        self._kept_bytes = kept_bytes
        self._paths: dict[int, Path] = saved_versions(run_dir)
        self._loaded: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    @property
    def versions(self) -> Sequence[int]:
        """Ascending, including 0."""
        return sorted({0, *self._paths})

    def starts(self, lag: int) -> Sequence[int]:
        """Every C for which all of C, C+1, ..., C+lag were saved. Raises RunDirectoryError if there is none."""
        saved = set(self.versions)
        found = [version for version in self.versions if saved.issuperset(range(version, version + lag + 1))]
        if not found:
            longest = _longest_run(self.versions)
            smaller = f", or choose --lag {longest - 1} or less" if longest > 2 else ""
            raise RunDirectoryError(
                f"{self._run_dir} has no {lag + 1} consecutive checkpoints (at most {longest}); train with "
                f"--trainer.checkpoint_every 1 --trainer.keep_checkpoints N, where N is the number of steps{smaller}"
            )
        return found

    def new_model(self, version: int, device: str) -> Any:
        """A new model with these weights. Raises ModelLoadError, and CheckpointError for damaged files."""
        path = self._paths.get(version)
        if path is None:
            return load_model(self._model, device)
        load_checkpoint(path)  # verifies every file
        return load_model(self._model.model_copy(update={"path": str(path)}), device)

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """The weights of `version` on the CPU, by name. Read only."""
        if version not in self._loaded:
            self._loaded[version] = named_weights(self.new_model(version, "cpu"))
            size = sum(tensor.numel() * tensor.element_size() for tensor in self._loaded[version].values())
            while len(self._loaded) > max(2, self._kept_bytes // size):
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(version)
        return self._loaded[version]


def choose_starts(wanted: Sequence[str], possible: Sequence[int], lag: int) -> Mapping[str, int]:
    """Name -> version C. A name is `early`, `middle`, `late` (of the ascending `possible` versions), or a version number.

    If several names mean the same version, only the first is kept. Raises UserError for any other text or version.
    """
    chosen: dict[str, int] = {}
    for name in wanted:
        if name in NAMED_STARTS:
            version = {"early": possible[0], "middle": median_low(possible), "late": possible[-1]}[name]
        elif name.isdecimal() and int(name) in possible:
            version = int(name)
        else:
            raise UserError(
                f"--from {name}: give {', '.join(NAMED_STARTS)}, or versions from which {lag} more were saved "
                f"({possible[0]} to {possible[-1]} here)"
            )
        if version not in chosen.values():
            chosen[name] = version
    if not chosen:
        raise UserError(f"--from names no version; give {', '.join(NAMED_STARTS)}, or versions")
    return chosen


def _longest_run(versions: Sequence[int]) -> int:
    """Length of the longest run of consecutive numbers in the ascending `versions`."""
    longest = current = 0
    for i, version in enumerate(versions):
        current = current + 1 if i and version == versions[i - 1] + 1 else 1
        longest = max(longest, current)
    return longest
