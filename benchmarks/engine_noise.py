"""What an engine's rounding does to importance weights on-policy, by the length of the completions.

python -m benchmarks.engine_noise MODEL                     # a folder of a Hugging Face model with at least 4100 positions

The engine is imitated with the trainer's own weights: tokens are sampled from logits that were rounded to bfloat16, as by an
engine with a bfloat16 head, and pi is the distribution of the same logits in float32. So there is no staleness, and log r =
log pi - log mu is rounding alone. Every completion is cut into windows of each length; a window counts as a rollout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import common
from pipelinerl.engine import LocalEngine
from pipelinerl.engine.sampler import SamplingRows, sample
from pipelinerl.types import GenerationRequest, SamplingParams

LENGTHS = (100, 1000, 4000)
PROMPT = "Once upon a time"


def log_ratios(folder: str, rollouts: int, tokens: int) -> torch.Tensor:
    """log pi - log mu of sampled tokens, shape (rollouts, tokens)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tuple(AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids)
    found = []

    def rounded(
        logits_RV: torch.Tensor, rows: SamplingRows | None, uniforms_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_R, logs_R = sample(logits_RV.bfloat16(), rows, uniforms_R)
        if len(ids_R) == rollouts:
            found.append(logits_RV.log_softmax(-1).gather(1, ids_R[:, None])[:, 0] - logs_R)
        return ids_R, logs_R

    engine = LocalEngine(model, slots=rollouts, max_length=len(prompt) + tokens)
    with patch("pipelinerl.engine.local.sample", rounded):
        for index in range(rollouts):
            sampling = SamplingParams(max_tokens=tokens)
            engine.submit(GenerationRequest(id=str(index), prompt_ids=prompt, sampling=sampling))
        while engine.in_progress or engine.queued:
            engine.step()
    return torch.stack(found, 1).double()


def by_length(logs_RT: torch.Tensor, length: int) -> dict[str, float]:
    """The weights of windows of `length` tokens under each correction with its default thresholds."""
    windows_WL = logs_RT[:, : logs_RT.shape[1] // length * length].reshape(-1, length)
    products_W, means_W = windows_WL.sum(1).exp(), windows_WL.mean(1).exp()
    limited_W = products_W.clamp(max=5.0)
    return {
        "tokens": length,
        "rollouts": len(products_W),
        "log-product sd": float(windows_WL.sum(1).std()),
        "truncate: mean weight": float(limited_W.mean()),
        "truncate: ESS": float(limited_W.sum().square() / (len(limited_W) * limited_W.square().sum())),
        "geo_truncate: lowest weight": float(means_W.clamp(max=2.0).min()),
        "geo_truncate: highest weight": float(means_W.clamp(max=2.0).max()),
        "geo_mask: kept": float(((means_W >= 0.9) & (means_W <= 1.1)).double().mean()),
        "token truncate: mean weight": float(windows_WL.exp().clamp(max=5.0).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "engine-noise.json")
    options = parser.parse_args()
    logs_RT = log_ratios(options.model, options.rollouts, max(LENGTHS))
    kl = float((logs_RT.expm1() - logs_RT).mean())
    rows = [by_length(logs_RT, length) for length in LENGTHS]
    result = {"machine": common.machine(), "model": Path(options.model).name, "kl_per_token": kl}
    options.out.write_text(json.dumps(result | {"lengths": rows}, indent=1) + "\n")
    print(f"KL(mu || pi) per token: {kl:.2g} nats\n\n{common.markdown(rows)}")


if __name__ == "__main__":
    main()
