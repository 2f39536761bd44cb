"""The wheel in an empty environment with the newest version of every package, and a command for every extra.

The versions are those that a user gets without constraints.txt. `make test-newest` runs this: it downloads 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.chat_parts import make_tokenizer

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
pytestmark = [pytest.mark.slow, pytest.mark.newest, pytest.mark.timeout(1800)]

SHORT = ["--trainer.steps=2", "--trainer.batch_size=32", "--evaluation.problems=8", "--metrics.plot=false"]
TRAIN = ["pipelinerl", "train", "--run_dir", "{extra}", *SHORT]
DRY = ["pipelinerl", "train", "--dry-run", "--run_dir", "{extra}", "--model.path=model"]  # the demo's reads only numbers
PROBLEMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
COMMANDS: dict[str, list[str]] = {
    "": TRAIN,
    "gguf": ["python", "-c", "import gguf, accelerate, scripts.convert_gguf"],
    **{name: [*TRAIN, f"--metrics.trackers=[{name}]"] for name in ("tensorboard", "wandb", "trackio", "mlflow")},
    "pandas": ["python", "-c", "import pipelinerl; run = pipelinerl.Run('base'); assert len(run.metrics) == 2"],
    "serve": ["python", "-c", "import pipelinerl.serving.server.run"],  # `http` starts a server
    "http": [*TRAIN, "--launch.kind=processes", "--engine.kind=http", "--engine.servers=1"],
    "redis": ["python", "-c", "import pipelinerl.hub.redis"],
    "parquet": ["python", "-c", "import pyarrow.parquet"],
    "math": [*DRY, "--environment.kind=math", "--environment.args.path=problems.jsonl"],
    "lora": [*TRAIN, "--model.lora.rank=4"],
    "reasoning-gym": [*DRY, "--environment.kind=reasoning_gym", "--environment.args.task=chain_sum"],
    "datasets": [
        *(*DRY, "--environment.kind=function", "--environment.args.data=dataset:data:train"),
        *("--environment.args.reward=rewards.py:reward", "--environment.args.prompt=question"),
    ],
    "verifiers": [*DRY, "--environment.kind=verifiers", "--environment.args.load=environment.py:load_environment"],
    "ray": ["python", "-c", "import pipelinerl.launch.hosts.ray"],
}
"""What tries each extra; without one, the demo."""

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    rows = [{"prompt": f"{n},{n}:", "answer": str(n)} for n in range(1, 40)]
    def right(completion, answer):
        return float(completion.endswith(answer))
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), message_type="completion")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, an empty environment and what the commands read."""
    folder = tmp_path_factory.mktemp("newest")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    # The only exception: a newer torch may be had only with the libraries for CUDA, which are gigabytes.
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    (folder / "torch.txt").write_text(torch)
    tokenizer = make_tokenizer(template=None)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_bytes((folder / "problems.jsonl").read_bytes())
    (folder / "rewards.py").write_text("def reward(completion, example):\n    return len(completion)\n")
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder


def test_every_extra_is_tried() -> None:
    assert set(COMMANDS) - {""} == set(EXTRAS) - {"all", "ui", "dev", "docs", "pages"}


@pytest.mark.parametrize("extra", COMMANDS)
def test_the_newest_packages_of_an_extra_work(extra: str, place: Path) -> None:
    programs = place / "venv" / "bin"
    (wheel,) = place.glob("*.whl")
    named = f"{wheel}[{extra}]" if extra else str(wheel)
    pip = [str(programs / "pip"), "install", "--quiet", "--quiet", "--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*pip, "--constraint", "torch.txt", named], cwd=place, check=True)
    first, *rest = COMMANDS[extra]
    command = [str(programs / first), *(word.replace("{extra}", extra or "base") for word in rest)]
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(place / "trackio"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | own
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    if "--dry-run" not in command and "train" in command:
        assert json.loads((place / (extra or "base") / "summary.json").read_text())["status"] == "finished"
