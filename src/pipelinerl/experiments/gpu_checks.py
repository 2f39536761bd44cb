"""What runs need of a GPU, tried in some 20 s: a program of `pipelinerl doctor`, since an error of CUDA ends a process.

Prints a line of JSON for each check: whether it passed, its name, what was found, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate

import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.engine.static import StaticEngine
from pipelinerl.errors import UserError
from pipelinerl.models import varlen
from pipelinerl.models.loading import load_model
from pipelinerl.models.transfers import to_device, to_host
from pipelinerl.types import GenerationRequest, SamplingParams

GPU = torch.device("cuda", 0)
LENGTHS = (300, 40, 1, 129)
TOKENS = 16
NARROW = 0.05
"""Largest relative difference in bfloat16, and largest mean difference of log-probabilities."""


def main() -> None:
    for what, (check, fix) in CHECKS.items():
        try:
            line = (True, what, check(), "")
        except Exception as error:  # noqa: BLE001 - whatever CUDA's libraries raise
            line = (False, what, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", fix)
        print(json.dumps(line), flush=True)
        if not line[0]:
            break  # what follows would fail as well


def attention() -> str:
    """Outputs and gradients of the kernel in bfloat16 are those of the reference in float32."""
    longest, total = max(LENGTHS), sum(LENGTHS)
    begins = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=GPU)
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(total, heads, 64, generator=generator) for heads in (4, 2, 2)]
    parts = []
    for attend, dtype in ((varlen.flash_attention, torch.bfloat16), (varlen.varlen_reference, torch.float32)):
        query, key, value = inputs = [part.to(GPU, dtype).requires_grad_() for part in host]
        out = attend(query, key, value, begins, begins, longest, longest, window_size=(-1, 0))
        parts.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    return _within(max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*parts, strict=True)))


def graph() -> str:
    """Tokens that replayed decode steps sampled have the probabilities of the model's own forward."""
    config, prompt = ModelConfig(path="demo", dtype="bfloat16"), (3, 4, 5, 6)
    engine = StaticEngine(load_model(config, GPU), slots=1, max_length=64, flatten=False)
    engine.submit(GenerationRequest(id="doctor", prompt_ids=prompt, sampling=SamplingParams(max_tokens=TOKENS, seed=0)))
    while not (done := engine.step().finished):
        pass
    ids = torch.tensor([[*prompt, *done[0].token_ids]], device=GPU)
    with torch.inference_mode():
        logprobs_TV = load_model(config, GPU)(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own_T = logprobs_TV.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return _within(float((own_T - torch.tensor(done[0].logprobs)).abs().mean()))


def pinned() -> str:
    """What goes to the GPU and comes back through pinned memory, without a wait for either, is the same."""
    host = torch.arange(1 << 22)
    if not (to_host(to_device(host, GPU))() == host.numpy()).all():
        raise UserError("copies through pinned memory arrive damaged")
    return f"{host.nbytes >> 20} MiB there and back"


def nccl() -> str:
    """A sum over all GPUs of this machine that torch sees."""
    count = torch.cuda.device_count()
    of = f"{count} GPU{'s' * (count > 1)}"
    ones = [torch.ones(1 << 20, device=f"cuda:{number}") for number in range(count)]
    torch.cuda.nccl.all_reduce(ones)  # type: ignore[no-untyped-call]
    if not all(bool((one == count).all()) for one in ones):
        raise UserError(f"its sum over {of} is wrong")
    return f"{'.'.join(map(str, torch.cuda.nccl.version()))}, a sum over {of}"  # type: ignore[no-untyped-call]


def _within(error: float) -> str:
    if not error <= NARROW:
        raise UserError(f"off by {error:.2g} (limit {NARROW})")
    return f"off by {error:.1g}"


CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "attention": (attention, "install a torch that is built for this GPU: https://pytorch.org/get-started/locally"),
    "CUDA graph": (graph, "--engine.decoding packed does without, and is slower"),
    "pinned memory": (pinned, "allow locked memory: ulimit -l unlimited; in a container --ulimit memlock=-1"),
    "nccl": (nccl, "trainer.ranks above 1 needs it; NCCL_DEBUG=INFO shows more"),
}

if __name__ == "__main__":
    main()
