"""The trainer stage as a whole: what it takes, publishes, records, refuses and resumes from."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.checkpoint import CheckpointState, by_version, latest_checkpoint, load_checkpoint, saved_versions
from pipelinerl.config.schema import PreprocessConfig, TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import CheckpointError, PolicyMismatchError
from pipelinerl.files import JsonLines
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord, TrainedRecord
from pipelinerl.preprocess.preprocessor import prepare
from pipelinerl.schedule import ConventionalSchedule, PipelineSchedule, Schedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.trainer import saving
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.status import TrainerOutput
from pipelinerl.trainer.step import Learner
from pipelinerl.trainer.trainer import Trainer
from pipelinerl.types import Group, Rollout, StageStatus, TrainerProgress, Turn
from pipelinerl.weights.receiving import Receiver
from pipelinerl.weights.sending import MemoryWeightSender
from tests.parity.models import tiny_llama
from tests.unit.engine.engine_parts import request
from tests.unit.group_parts import GroupStream, group
from tests.unit.test_checkpoint import make_tokenizer

K = 4
PROMPT = (1, 2, 3)


class Engine:
    """Generates whole groups with the newest weights it was sent. Its log-probs are off by `noise`."""

    def __init__(self, receiver: Receiver, noise: float = 0.0) -> None:
        self.engine = LocalEngine(tiny_llama(), slots=K, max_length=16, flatten=False)
        self.receiver = receiver
        self.noise = noise
        self.versions: list[int] = []

    def take_weights(self) -> None:
        update = self.receiver.poll()
        if update is not None:
            self.receiver.acknowledge(self.engine.update_weights(update))
            self.versions.append(update.version)

    def group(self, index: int) -> Group:
        generator = torch.Generator().manual_seed(index)
        wanted = [request(f"{index}/{attempt}", PROMPT, 2 + attempt) for attempt in range(K)]
        rollouts = []
        for attempt, exact in enumerate(self.engine.generate(wanted)):
            noise_T = self.noise * torch.randn(len(exact.token_ids), generator=generator)
            logprobs = (torch.tensor(exact.logprobs) + noise_T).clamp(max=0.0).tolist()
            turn = Turn(prompt_ids=PROMPT, completion=msgspec.structs.replace(exact, logprobs=tuple(logprobs)))
            own = {"id": exact.request_id, "attempt": attempt, "metrics": {"words": 1.0}}
            rollouts.append(Rollout(turns=(turn,), reward=float(attempt % 2), **own))
        return group(index, rollouts)


class Setup:
    """A trainer with everything around it in memory, but for what it writes."""

    def __init__(
        self,
        run_dir: Path,
        schedule: Schedule | None = None,
        *,
        noise: float = 0.0,
        resume: bool = False,
        stopped: Callable[[], bool] = lambda: False,
        weighs_products: bool = False,
        **changes: object,
    ) -> None:
        self.config = TrainerConfig(**({"batch_size": 4, "steps": 6, "learning_rate": 1e-2} | changes))
        self.run_dir = run_dir
        messages = DirectMessages()
        self.sender = MemoryWeightSender(messages)
        self.engine = Engine(Receiver(messages, self.sender.tensors), noise)
        self.board = MemoryBoard()
        self.writer = GroupStream(partial(prepare, config=PreprocessConfig()))
        model, state = tiny_llama(), CheckpointState(version=0)
        path = latest_checkpoint(run_dir) if resume else None
        if path is not None:
            model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.learner = Learner(model, self.config, temperature=1.0)
        if path is not None:
            checkpoint = load_checkpoint(path)
            state = checkpoint.state
            self.learner.load_optimizer(checkpoint)
        self.queue = SampleQueue(self.writer, position=state.positions, counts=state.counters.queue)
        (run_dir / "rollouts").mkdir(exist_ok=True)
        self.trainer = Trainer(
            self.config,
            self.learner,
            self.queue,
            schedule or PipelineSchedule(self.config.batch_size),
            self.sender,
            output=TrainerOutput(
                board=self.board,
                record=JsonLines(run_dir / "metrics.jsonl").write,
                trained_log=JsonLines(run_dir / "rollouts" / "trained.jsonl"),
                published_log=JsonLines(run_dir / "published.jsonl"),
                started_s=time.monotonic(),
                weighs_products=weighs_products,
            ),
            checkpoints=run_dir / "checkpoints",
            tokenizer=make_tokenizer(),
            state=state,
            stopped=stopped,
        )

    def feed(self, indices: Sequence[int]) -> None:
        self.engine.take_weights()
        for index in indices:
            self.writer.write(self.engine.group(index))

    def pump_all(self) -> None:
        while self.trainer.pump():
            pass

    def train_to(self, version: int) -> None:
        while self.trainer.version < version:
            self.trainer.pump()

    def drive(self, after_turn: Callable[[], object] = lambda: None) -> None:
        """One group between two turns of the trainer, to the end."""
        index = 0
        self.trainer.start()
        while not self.trainer.goal_reached:
            self.feed([index])
            index += 1
            self.trainer.pump()
            after_turn()
        self.engine.take_weights()
        self.trainer.finish()

    @property
    def status(self) -> StageStatus:
        status = self.board.read("trainer")
        assert status is not None
        return status

    @property
    def progress(self) -> TrainerProgress:
        assert isinstance(self.status.progress, TrainerProgress)
        return self.status.progress

    def records(self) -> list[StepRecord]:
        return read_records(self.run_dir / "metrics.jsonl", StepRecord)


def weights(setup: Setup) -> list[torch.Tensor]:
    return [p.detach().clone() for p in setup.learner.model.parameters()]


def test_a_run_takes_its_steps_and_publishes_each(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.drive()
    assert setup.engine.versions == [0, 1, 2, 3, 4, 5, 6]
    records = setup.records()
    assert [record.version for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record.samples == 4 and record.lag_max in (0, None) for record in records)
    assert {record.learning_rate for record in records} == {1e-2}
    assert max(record.on_policy_gap or 0.0 for record in records) < 1e-5
    assert min(record.ess for record in records if record.ess is not None) > 0.999
    assert all(0 < record.publish_s < record.train_s for record in records)
    assert all(record.cpu_s.keys() == {"step", "publish", "saving", "other"} for record in records)
    assert all(min(record.cpu_s["step"], record.cpu_s["publish"], record.cpu_s["other"]) > 0 for record in records)
    size = sum(weight.nbytes for weight in weights(setup))
    assert [(one.version, one.bytes, one.encoding) for one in (record.update for record in records) if one] == [
        (version, size, "full") for version in range(1, 7)
    ]
    assert setup.status.state == "done"
    assert setup.progress.goal_reached
    assert (setup.progress.trained, setup.progress.queued, setup.progress.published_version) == (24, 0, 6)
    assert setup.progress.latest["version"] == 6
    assert not any("metric" in name for name in setup.progress.latest), "their number has no bound"
    assert not setup.trainer.pump(), "nothing more to do"


def test_it_waits_without_blocking_and_says_for_what(tmp_path: Path) -> None:
    setup = Setup(tmp_path, batch_size=8)
    setup.trainer.start()
    assert not setup.trainer.pump()
    assert setup.status.state == "waiting"
    assert "0 of 8" in setup.status.detail
    setup.feed([0])
    assert setup.trainer.pump(), "it took a group in"
    assert setup.trainer.version == 0
    assert not setup.trainer.pump()
    setup.feed([1])
    assert setup.trainer.pump()
    assert setup.trainer.version == 1


@pytest.mark.parametrize(("noise", "weighs_products"), [(2.0, True), (2.0, False), (0.01, True)])
def test_a_large_spread_of_products_is_a_warning(tmp_path: Path, noise: float, weighs_products: bool) -> None:
    setup = Setup(tmp_path, noise=noise, weighs_products=weighs_products)
    setup.drive()
    above = [step.version for step in setup.records() if (step.log_product_sd or 0.0) > 1]
    assert bool(above) == (noise == 2.0)
    assert len(setup.progress.notes) == (noise == 2.0 and weighs_products)
    assert all(f"log_product_sd is above 1 since step {above[0]}:" in note for note in setup.progress.notes)


def test_the_ess_guard_drops_what_is_off_policy_and_goes_on_with_fresh_rollouts(tmp_path: Path) -> None:
    # Steps this large take the policy far from the one that sampled the groups waiting in the stream.
    setup = Setup(tmp_path, ess_threshold=0.97, learning_rate=0.3, steps=2, batch_size=8)
    setup.trainer.start()
    setup.feed(range(6))
    setup.pump_all()
    assert setup.trainer.version == 1
    assert setup.progress.dropped == {"ess_guard": 16}
    before = weights(setup)
    assert setup.status.state == "waiting"
    setup.feed([6, 7])
    assert setup.trainer.pump()
    assert setup.trainer.version == 2
    assert setup.records()[-1].ess_guard_trips == 1, "what came after the refusal was dropped, not refused again"
    assert setup.records()[-1].lag_max == 0
    assert not torch.equal(before[0], weights(setup)[0])
    assert setup.progress.trained + sum(setup.progress.dropped.values()) == 8 * K
    first, second = read_lines(tmp_path / "rollouts" / "trained.jsonl", TrainedRecord)
    assert first.refused == ()
    assert [[sample.id for sample in batch] for batch in second.refused] == [[f"{g}/{a}" for g in (2, 3) for a in range(K)]]


def test_conventional_publishes_once_a_round_and_drops_what_it_leaves_over(tmp_path: Path) -> None:
    setup = Setup(tmp_path, ConventionalSchedule(4, 2), steps=5)
    setup.trainer.start()
    setup.feed(range(3))  # a group more than the round needs
    setup.pump_all()
    assert setup.trainer.version == 2
    assert setup.progress.dropped == {"round_surplus": K}
    for groups in ([3, 4], [5, 6]):
        setup.feed(groups)
        setup.pump_all()
    setup.engine.take_weights()
    assert setup.engine.versions == [0, 2, 4, 5], "the last weights, too"
    assert [record.publish_s > 0 for record in setup.records()] == [False, True, False, True, True]
    assert [record.lag_max for record in setup.records()] == [0, 1, 0, 1, 0]
    assert [(record.versions_in_batch, record.crossing_fraction) for record in setup.records()] == [(1, 0.0)] * 5


def test_an_on_policy_batch_below_the_threshold_is_a_mismatch_with_numbers(tmp_path: Path) -> None:
    setup = Setup(tmp_path, ess_threshold=0.9, noise=2.0)
    setup.trainer.start()
    setup.feed([0])
    with pytest.raises(PolicyMismatchError, match=r"ESS is 0\.\d+, below trainer\.ess_threshold 0\.9.*by up to \d"):
        setup.trainer.pump()
    assert setup.trainer.version == 0


def test_no_step_is_taken_before_the_engines_have_weights(tmp_path: Path) -> None:
    """A resumed run may have batches in its stream while engines still load: the trainer says what it waits for."""
    resumed, other = Setup(tmp_path, steps=100), tmp_path / "other"
    other.mkdir()
    made_before = Setup(other)
    made_before.trainer.start()
    made_before.engine.take_weights()
    for index in range(3):
        resumed.writer.write(made_before.engine.group(index))
    turns = iter(range(8))

    def stop() -> bool:
        turn = next(turns)
        if 1 <= turn < 5:
            assert (resumed.trainer.version, resumed.status.state) == (0, "waiting")
            assert resumed.status.waits_for == ("engine",)
        if turn >= 4:
            resumed.engine.take_weights()
        return turn == 7

    resumed.trainer.run(stop)
    assert resumed.trainer.version == 3


def test_copies_of_the_weights_come_when_due_and_are_of_their_version(tmp_path: Path) -> None:
    setup = Setup(tmp_path, steps=5, weights_every=2)
    seen: dict[int, list[torch.Tensor]] = {}
    setup.drive(lambda: seen.update({setup.trainer.version: weights(setup)}))
    saved = saved_versions(tmp_path)
    assert list(saved) == [2, 4, 5]  # 5 is the last checkpoint
    assert [path.parent.name for path in saved.values()] == ["weights", "weights", "checkpoints"]
    for version, path in saved.items():
        load_checkpoint(path)  # verifies every file
        model = AutoModelForCausalLM.from_pretrained(path)
        for mine, there in zip(seen[version], model.state_dict().values(), strict=True):
            assert torch.equal(mine, there)
    assert not (saved[2] / "optimizer.safetensors").exists()
    for spent in ([one.saving_s for one in setup.records()], [one.cpu_s["saving"] for one in setup.records()]):
        assert [seconds > 0 for seconds in spent] == [False, False, True, False, True]


def test_steps_go_on_while_a_checkpoint_is_on_its_way_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream keeps what only the checkpoint before needs until then."""
    written = threading.Event()
    monkeypatch.setattr(saving, "sync_tree", lambda _: written.wait(60))
    setup = Setup(tmp_path, steps=4, checkpoint_every=2)
    commit = Mock(wraps=setup.queue.commit)
    setup.queue.commit = commit  # type: ignore[method-assign]
    setup.trainer.start()
    setup.feed(range(4))
    setup.train_to(3)
    assert latest_checkpoint(tmp_path) is None
    assert commit.call_count == 0
    written.set()
    setup.trainer.pump()
    setup.trainer.finish()
    assert list(by_version(tmp_path / "checkpoints")) == [2, 4]
    assert commit.call_count == 2


def test_a_disk_that_is_full_is_noticed_before_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "sync_tree", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    setup = Setup(tmp_path, steps=4, checkpoint_every=2)
    setup.trainer.start()
    setup.feed(range(4))
    with pytest.raises(CheckpointError, match="No space left on device"):
        setup.train_to(4)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_resumed_trainer_takes_the_same_next_steps(tmp_path: Path) -> None:
    """Groups of 4 and batches of 3: checkpoints fall inside groups."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    config = {"batch_size": 3, "steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9}
    straight = Setup(tmp_path / "a", **config)
    straight.trainer.start()
    straight.feed([0, 1, 2])
    straight.train_to(4)

    first = Setup(tmp_path / "b", **config)
    first.trainer.start()
    first.feed([0, 1, 2])
    first.train_to(2)
    while latest_checkpoint(tmp_path / "b") is None:  # another thread gives it its name
        time.sleep(0.001)
    resumed = Setup(tmp_path / "b", resume=True, **config)
    position = resumed.queue.position()
    assert (resumed.trainer.version, position.offset, position.settled_ids) == (2, 1, ("1/0", "1/1"))
    resumed.engine.versions = first.engine.versions
    for index in range(3):  # the stream as it was kept: offset 0 is read and skipped
        resumed.writer.write(first.engine.group(index))
    resumed.trainer.start()
    resumed.train_to(4)
    for a, b in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(a, b)
    assert resumed.progress.trained == straight.progress.trained == 12
    expected = msgspec.structs.asdict(straight.records()[-1])
    actual = msgspec.structs.asdict(resumed.records()[-1])
    for field in ("version", "loss", "ess", "lag_max", "reward_mean", "grad_norm", "dropped", "queued"):
        assert actual[field] == expected[field], field


def test_a_request_to_stop_makes_the_current_step_the_last_one(tmp_path: Path) -> None:
    setup = Setup(tmp_path, stopped=lambda: setup.trainer.version >= 3)
    setup.drive()
    assert setup.trainer.version == 3
    assert setup.progress.goal_reached, "the actor ends, too"
    assert setup.progress.published_version == 3
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000003"
    resumed = Setup(tmp_path, resume=True)
    resumed.drive()
    assert resumed.trainer.version == 6
