"""A run's model for the Hugging Face Hub, with a model card."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelinerl.checkpoint import OPTIMIZER_FILE, STATE_FILE, load_checkpoint
from pipelinerl.config import yaml_text
from pipelinerl.config.secrets import without_paths, without_secrets
from pipelinerl.errors import UserError
from pipelinerl.experiments.evaluate.models import Target, find_targets
from pipelinerl.metrics.reading import read_lines
from pipelinerl.metrics.records import SessionRecord
from pipelinerl.report.series import read_config, read_summary
from pipelinerl.report.terminal import summary_sections
from pipelinerl.run_directory import RunDirectory

CURVES = "curves.png"


@contextmanager
def prepared(run_dir: Path, repo: str, version: str | float | None = None) -> Iterator[Path]:
    """A temporary folder with what is uploaded to `repo`. Raises UserError, and CheckpointError for a damaged checkpoint."""
    from pipelinerl.models.folder import can_be_an_id  # noqa: PLC0415 - takes a second

    if repo.count("/") > 1 or not can_be_an_id(repo):
        raise UserError(f"{repo!r} can't be the id of a model on the hub; give owner/name")
    (target,) = find_targets([str(run_dir) if version is None else f"{run_dir}@{version}"])
    source = Path(target.model.path)
    load_checkpoint(source)  # verifies every file
    with tempfile.TemporaryDirectory(prefix="pipelinerl-push-") as name:
        folder, of_a_resume = Path(name), shutil.ignore_patterns(STATE_FILE, OPTIMIZER_FILE)
        shutil.copytree(source, folder, copy_function=_link, ignore=of_a_resume, dirs_exist_ok=True)
        if (run_dir / CURVES).is_file():
            shutil.copyfile(run_dir / CURVES, folder / CURVES)
        (folder / "README.md").write_text(model_card(run_dir, repo, target), encoding="utf-8")
        yield folder


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload the folder to the hub; returns its address. Raises UserError if the hub refuses it."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - takes a second

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model"))
    except Exception as error:  # the hub and its HTTP library raise many types
        reason = " ".join(str(error).split())
        raise UserError(f"the hub did not take {repo}: {reason} (log in with `hf auth login`, or set HF_TOKEN)") from error


def model_card(run_dir: Path, repo: str, target: Target) -> str:
    """The README of the repository, as Markdown."""
    config = read_config(run_dir)
    summary = read_summary(run_dir) or {}
    shown = without_paths(without_secrets(config)) | {"run_dir": None}
    base, task = config.model.path, without_paths(config.environment.kind)
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "pipelinerl"],
        **({"base_model": base} if base.count("/") == 1 and not os.path.isabs(base) else {}),
    }
    figure = f"![curves of the run]({CURVES})\n" if (run_dir / CURVES).is_file() else ""
    return f"""---
{yaml_text.dump(front)}---

# {repo.rpartition("/")[2]}

{without_paths(base)}, trained by reinforcement learning with [pipelinerl](https://arxiv.org/abs/2509.19128) (in-flight
weight updates) on the environment `{task}`. These are the weights after {target.version} optimizer steps.

{_table(summary)}
{figure}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```

## How it was made

{_provenance(run_dir)}
With the run file below: `pipelinerl train run.yaml`

```yaml
{yaml_text.dump(shown).rstrip()}
```
"""


def _table(summary: Mapping[str, Any]) -> str:
    rows = [(name.strip(), value) for section in summary_sections(summary)[:3] for name, value in section] if summary else []
    lines = [f"| {name} | {value.replace('|', ' ')} |" for name, value in (*rows, ("the run", str(summary.get("status"))))]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _provenance(run_dir: Path) -> str:
    if not (sessions := read_lines(RunDirectory(run_dir).sessions, SessionRecord)):
        return ""
    machine = sessions[-1].machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return f"On {machine.processor} ({machine.instructions}), in {len(sessions)} session(s), with {packages}.\n"


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where there can be none: a model may be large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
