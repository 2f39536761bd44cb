"""Whether PyTorch can compute on a device of this machine."""

from __future__ import annotations

import torch

from pipelinerl.errors import UserError


def require_device(device: torch.device | str) -> None:
    """Raise UserError unless `device` is a CPU or a CUDA GPU, and PyTorch can compute on it on this machine."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {str(device)!r} is unknown to PyTorch; use cpu, cuda or cuda:N") from error
    instead = "use cpu"
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.version.cuda is None and torch.version.hip is None:
            problem = f"the PyTorch installed here ({torch.__version__}) is built without CUDA"
            instead = "use cpu, or install a PyTorch with CUDA"
        elif not count:
            problem = "PyTorch finds no CUDA GPU here (nvidia-smi shows what the driver finds)"
        elif (wanted.index or 0) >= count:
            problem, instead = f"there are {count} CUDA GPUs here", f"use cuda:0 to cuda:{count - 1}"
        else:
            return
    elif wanted.type == "cpu":
        return
    else:
        problem, instead = "models run on CPUs and CUDA GPUs only", "use cpu, cuda or cuda:N"
    raise UserError(f"device {str(device)!r} can't be used: {problem}; {instead}")
