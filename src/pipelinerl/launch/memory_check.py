"""Before anything starts: will the run fit into this machine's memory? A run that can't is refused, with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.launch.memory import HOST, Prediction, predict
from pipelinerl.launch.memory_machine import Memory, device_memory, host_memory
from pipelinerl.models.folder import downloaded, find_model
from pipelinerl.models.shape import ModelShape, read_shape

Machine = Callable[[str], Memory | None]
"""The memory of a device (`cpu` or a CUDA device), None if it is not known."""
SHOWN_USES = 5
WORTH_IT = 0.1
"""Share of the memory from which a use is worth a word of what to do about it."""


class Judgement(NamedTuple):
    """`line` is for the start of the run; `warnings` say what may go wrong, in a line each."""

    line: str
    warnings: Sequence[str] = ()
    prediction: Prediction | None = None

    def report(self) -> list[str]:
        """Every use of memory, in lines for people."""
        processes = self.prediction.processes if self.prediction else ()
        table = [
            f"  {process.role:<26} {part.name:<28} {_range(part.least, part.most):>20}  {part.device}"
            for process in processes
            for part in process.parts
        ]
        return [self.line, *table, *self.lines[1:]]

    @property
    def lines(self) -> list[str]:
        """What is said at the start of a run."""
        return [self.line, *(f"warning: {warning}" for warning in self.warnings)]

    @property
    def predicted_bytes(self) -> dict[str, int]:
        """The most that each process takes, all devices together; empty if it is not known."""
        processes = self.prediction.processes if self.prediction else ()
        return {process.role: sum(part.most for part in process.parts) for process in processes}


def check_memory(config: RunConfig, longest_prompt: int | None = None) -> Judgement:
    """Read the model's sizes, predict and judge. `longest_prompt`, in tokens, if it is known that none is longer.

    Raises UserError for a run that can't fit, ModelLoadError for no model.
    """
    shape = _shape(find_model(config.model.path))
    if shape is None:
        return Judgement(f"memory: not predicted (the sizes of model {config.model.path!r} are not known here)")
    return judge(config, predict(config, shape, longest_prompt), this_machine)


def _shape(found: str) -> ModelShape | None:
    """The sizes of the model in a folder, or of a hub id that was downloaded before, all of it."""
    if Path(found).is_dir():
        return read_shape(Path(found))
    folder = downloaded(found)
    try:
        return None if folder is None else read_shape(Path(folder))
    except ModelLoadError:  # what is missing is downloaded when the model is loaded
        return None


def judge(config: RunConfig, prediction: Prediction, machine: Machine) -> Judgement:
    """Compare with what there is.

    Refused is only what can't fit: whose `least` is more than the device has in all. Whatever may not fit, because answers
    grow or because others use the memory now, is warned of. Raises UserError.
    """
    lines, warnings = [], []
    for device in prediction.devices:
        memory, on = machine(device), "" if device == HOST else f" on {device}"
        most, least = prediction.bytes_on(device), prediction.bytes_on(device, least=True)
        if memory is None:
            lines.append(f"up to {gigabytes(most)}{on}")
            continue
        total, details = gigabytes(memory.total), _details(config, prediction, device)
        lines.append(f"up to {gigabytes(most)} of {total}{on}")
        if least > memory.total:
            raise UserError(f"the run needs at least {gigabytes(least)} of memory{on}, and there are {total} {details}")
        needs = f"the run may need {gigabytes(most)} of memory{on}"
        if most > memory.total:
            warnings.append(f"{needs} if prompts and answers are as long as they may be, and there are {total} {details}")
        elif memory.available is not None and most > memory.available:
            warnings.append(f"{needs}, and only {gigabytes(memory.available)} are free now: others use the rest")
    parts = ", ".join(
        f"{process.role} {gigabytes(sum(part.most for part in process.parts))}" for process in prediction.processes
    )
    return Judgement(f"memory: {' and '.join(lines)} ({parts})", warnings, prediction)


def this_machine(device: str) -> Memory | None:
    return host_memory() if device == HOST else device_memory(device)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _range(least: int, most: int) -> str:
    return f"{most / 1e6:.0f} MB" if least == most else f"{least / 1e6:.0f} to {most / 1e6:.0f} MB"


def _details(config: RunConfig, prediction: Prediction, device: str) -> str:
    """What takes most, and what to do about it."""
    table = ", ".join(f"{name} {gigabytes(size)}" for name, size in prediction.largest(device)[:SHOWN_USES])
    return f"({table}); {'; '.join(_advice(config, prediction, device))}"


def _advice(config: RunConfig, prediction: Prediction, device: str) -> list[str]:
    """What to change, by what takes most; of what takes little nothing is said."""
    remedies = {
        "KV cache": ["lower engine.slots or engine.max_length"],
        "activations": [
            "lower trainer.micro_batch_tokens (the step does not depend on it)",
            *([] if config.trainer.gradient_checkpointing else ["set trainer.gradient_checkpointing to true"]),
        ],
        "logits": ["lower trainer.micro_batch_tokens (the step does not depend on it)"],
        "Adam's moments": ["set model.lora to {}"] if config.model.lora is None else [],
        "weights": ["set model.dtype to bfloat16"] if config.model.dtype == "float32" else [],
        "reference model": ["set trainer.kl_coefficient to 0"],
    }
    worth_it = [name for name, size in prediction.largest(device) if size >= WORTH_IT * prediction.bytes_on(device)]
    return [*dict.fromkeys(remedy for name in worth_it for remedy in remedies.get(name, [])), "or take a smaller model"]
