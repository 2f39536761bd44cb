"""A client of the Tinker API that never waits for the end of a batch: sampling and training overlap, and new weights reach
sequences while they are being generated. The demo's model learns greatest common divisors.

export TINKER_API_KEY=tml-local
pipelinerl serve demo --train saved &
python examples/tinker_loop.py http://127.0.0.1:8000
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque

import tinker
from tinker import ModelInput, SamplingParams, TensorData

STEPS, GROUPS, SAMPLES = 25, 8, 8


def main(url: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    trainer = service.create_lora_training_client("demo", rank=16, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    sampler = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    problems, asked = random.Random(0), deque()
    for step in range(1, STEPS + 1):
        while len(asked) < 2 * GROUPS:  # half of them are in progress while the other half is trained on
            part, i, j = problems.randint(1, 12), *problems.sample(range(1, 9), 2)
            a, b = part * i, part * j
            prompt = ModelInput.from_ints(tokenizer.encode(f"{a:02d},{b:02d}:", add_special_tokens=False))
            asked.append((prompt, math.gcd(a, b), sampler.sample(prompt, SAMPLES, SamplingParams(max_tokens=60))))
        data, rewards = [], []
        for prompt, answer, future in [asked.popleft() for _ in range(GROUPS)]:
            sequences = future.result().sequences
            texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
            right = [text.rpartition(">")[2] == f"{answer:02d}" for text in texts]
            rewards += right
            mean = sum(right) / SAMPLES
            if 0 < mean < 1:
                data += [datum(prompt, one, good - mean) for one, good in zip(sequences, right, strict=True)]
        if data:
            trained = trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(tinker.AdamParams(learning_rate=1e-3))
            trained.result()
            trainer.save_weights_and_get_sampling_client(kind="inflight").result()
        print(f"step {step:2d}: reward {sum(rewards) / len(rewards):.2f}", flush=True)


def datum(prompt: ModelInput, sampled: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """Position i of every input is about the token that follows token i: 0 within the prompt."""
    ids, before = [*prompt.to_ints(), *sampled.tokens], prompt.length - 1
    scale = advantage / (GROUPS * SAMPLES)  # the server adds up tokens and takes no means
    inputs = {
        "target_tokens": TensorData(data=ids[1:], dtype="int64"),
        "logprobs": TensorData(data=[0.0] * before + list(sampled.logprobs), dtype="float32"),
        "advantages": TensorData(data=[0.0] * before + [scale] * len(sampled.tokens), dtype="float32"),
    }
    return tinker.Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main(sys.argv[1])
