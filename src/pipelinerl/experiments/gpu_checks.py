"""Tries what runs need of a GPU, and prints each finding as a line of JSON: a program, as an error of CUDA ends one."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf

import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.engine.static import StaticEngine
from pipelinerl.models import varlen
from pipelinerl.models.device import to_device, to_host
from pipelinerl.models.loading import load_model
from pipelinerl.types import GenerationRequest, SamplingParams

GPU = torch.device("cuda", 0)
NARROW = 0.05
"""Largest relative difference in bfloat16, and largest mean difference of log-probabilities."""


def main() -> None:
    for what, (check, fix) in CHECKS.items():
        try:
            error = check()
            found = f"off by {error:.1g}"
        except Exception as raised:  # noqa: BLE001 - whatever CUDA's libraries raise
            error, found = inf, f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
        fine = error <= NARROW
        print(json.dumps(("ok", what, found) if fine else ("WRONG", what, found, fix)), flush=True)
        if not fine:
            break  # what follows would fail as well


def attention() -> float:
    """Outputs and gradients of the kernel in bfloat16 are those of the reference in float32."""
    begins = torch.tensor([0, 300, 340, 341, 470], dtype=torch.int32, device=GPU)
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(470, heads, 64, generator=generator) for heads in (4, 2, 2)]
    parts = []
    for attend, dtype in ((varlen.flash_attention, torch.bfloat16), (varlen.varlen_reference, torch.float32)):
        query, key, value = inputs = [part.to(GPU, dtype).requires_grad_() for part in host]
        out = attend(query, key, value, begins, begins, 300, 300, window_size=(-1, 0))
        parts.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*parts, strict=True))


def graph() -> float:
    """Tokens that replayed decode steps sampled have the probabilities of the model's own forward."""
    config, prompt = ModelConfig(path="demo", dtype="bfloat16"), (3, 4, 5, 6)
    engine = StaticEngine(load_model(config, GPU), slots=1, max_length=64, flatten=False)
    engine.submit(GenerationRequest(id="doctor", prompt_ids=prompt, sampling=SamplingParams(max_tokens=16, seed=0)))
    while not (done := engine.step().finished):
        pass
    ids = torch.tensor([[*prompt, *done[0].token_ids]], device=GPU)
    with torch.inference_mode():
        logprobs_TV = load_model(config, GPU)(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own_T = logprobs_TV.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return float((own_T - torch.tensor(done[0].logprobs)).abs().mean())


def pinned() -> float:
    """What goes to the GPU and comes back through pinned memory, without a wait for either, is the same."""
    host = torch.arange(1 << 22)
    return float((to_host(to_device(host, GPU))() != host.numpy()).mean())


def nccl() -> float:
    """A sum over all GPUs of this machine that torch sees."""
    ones = [torch.ones(1 << 20, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    torch.cuda.nccl.all_reduce(ones)  # type: ignore[no-untyped-call]
    return max(float((one - len(ones)).abs().max()) for one in ones)


CHECKS: dict[str, tuple[Callable[[], float], str]] = {
    "attention": (attention, "install a torch that is built for this GPU: https://pytorch.org/get-started/locally"),
    "CUDA graph": (graph, "--engine.decoding packed does without, and is slower"),
    "pinned memory": (pinned, "allow locked memory: ulimit -l unlimited; in a container --ulimit memlock=-1"),
    "nccl": (nccl, "trainer.ranks above 1 needs it; NCCL_DEBUG=INFO shows more"),
}

if __name__ == "__main__":
    main()
