"""One optimizer step over B rollouts, computed in micro-batches.

    samples ──pack──▶ micro-batches ──forward──▶ log-probs ──loss──▶ terms / Z ──backward──▶ gradient sum
                                                                                               │
                          version + 1 ◀── AdamW ◀── clip ◀── ESS of the whole batch high enough?

Z belongs to the step, not to the micro-batch (see `losses`), so the gradient does not depend on the packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipelinerl.checkpoint import OPTIMIZER_FILE, Checkpoint
from pipelinerl.config.schema import CorrectionConfig, TrainerConfig
from pipelinerl.errors import TrainingDivergedError
from pipelinerl.models.packed import MAX_PADDING_WASTE, PackedRow, checkpoint_activations, training_forward
from pipelinerl.models.state import named_weights, write_safetensors
from pipelinerl.trainer.logprobs import RowLogprobs
from pipelinerl.trainer.losses import DEFAULT_CORRECTION, LossInputs, make_loss
from pipelinerl.trainer.micro_batch import MicroBatch, pack_shared, padded_bins, segment_lengths
from pipelinerl.trainer.on_policy import OnPolicyStats
from pipelinerl.trainer.optimizer import Optimizer, learning_rate
from pipelinerl.types import Segment, TrainingSample

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel

OnMicroBatch = Callable[[int, int], None]
"""Called with the numbers of micro-batches done and in total."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step. `stepped` is False if the ESS guard rejected the batch; the weights are then unchanged.

    `learning_rate` is the rate that was used: the schedule's, times the factor of `trainer.ess_lr`.

    `metrics` is of `OnPolicyStats`; None if no rollout of the step had a gradient. `tokens_context` counts the tokens of
    samples with a gradient that are not trained on, `tokens_forwarded` those that went through the model: what samples of a
    micro-batch share counts once. `packing_efficiency`: the share of the attention's cells that is not padding.
    """

    stepped: bool
    samples: int
    samples_skipped: int
    tokens_trained: int
    tokens_context: int
    tokens_forwarded: int
    micro_batches: int
    packing_efficiency: float | None
    loss: float
    metrics: dict[str, Any] | None
    learning_rate: float
    grad_norm: float | None = None
    gradient_cosine: float | None = None

    def measured(self) -> dict[str, Any]:
        """The numbers by their names in `metrics.records.StepRecord`."""
        return {name: value for name, value in vars(self).items() if name not in ("stepped", "metrics")} | (
            self.metrics or {}
        )


@dataclass
class Sums:
    """What the micro-batches of a step add up to, besides gradients: loss, tokens of the model, and attention's cells."""

    loss: Tensor
    stats: OnPolicyStats = field(default_factory=OnPolicyStats)
    forwarded: int = 0
    cells: int = 0


class Learner:
    """A model with its loss and optimizer.

    `temperature` is the sampling temperature of the rollouts, so that log-probabilities are of the distribution that was
    sampled from. With `skip_zero_advantage`, rollouts without a gradient get no forward pass, but still count in Z. `lora`
    is set if `model` has adapters, which are then the only trained weights.

    Raises UnsupportedModelError if the model can't be trained on several sequences at once, and ModelLoadError if it can't
    recompute activations although the configuration asks for it.
    """

    _waste = MAX_PADDING_WASTE
    _several_ranks = False

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        temperature: float,
        correction: CorrectionConfig = DEFAULT_CORRECTION,
        skip_zero_advantage: bool = True,
        lora: LoraModel | None = None,
    ) -> None:
        model.eval()  # no dropout, so that the trained policy is the sampling policy
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        self._forward = training_forward(model)
        if config.compile:
            from pipelinerl.models.layers import compile_layers  # noqa: PLC0415 - an option

            self._forward = compile_layers(self._forward)
        self._row_logprobs = RowLogprobs(
            self._forward, temperature=temperature, head_chunk=config.head_chunk, several_ranks=self._several_ranks
        )
        self._least_shared = self._forward.least_shared
        self.runner = self._forward.description
        if model.config.get_text_config() is not model.config:
            from pipelinerl.models.own_forward import freeze_all_but_text  # noqa: PLC0415 - few models are more than text

            freeze_all_but_text(model)
        self.model = model
        self.lora = lora
        self.optimizer = self._new_optimizer(config)
        self._config = config
        self._loss = make_loss(config, correction)
        # With a KL or drift penalty every token has a gradient, even at zero advantage.
        self._skip_zero_advantage = skip_zero_advantage and config.kl_coefficient == 0 and correction.drift == 0
        self._device: torch.device = next(model.parameters()).device

    def _new_optimizer(self, config: TrainerConfig) -> Optimizer:
        return Optimizer(self.model, betas=config.betas, weight_decay=config.weight_decay)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights that engines use at this version, by their names in the engine's model (adapters are merged)."""
        model, lora = self._whole()
        return named_weights(model) if lora is None else lora.weights()

    def adapter(self) -> Mapping[str, Tensor]:
        """The tensors of the adapter that `weights` has merged; none without one."""
        _, lora = self._whole()
        return {} if lora is None else lora.tensors()

    def save_pretrained(self, folder: Path) -> None:
        """Write these weights as a Hugging Face folder, together with the adapter if there is one."""
        model, lora = self._whole()
        (lora or model).save_pretrained(folder)

    def _whole(self) -> tuple[Any, LoraModel | None]:
        """The model with all its weights, and its adapters."""
        return self.model, self.lora

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's state to the folder of a checkpoint."""
        write_safetensors(self.optimizer.state(), folder / OPTIMIZER_FILE)

    def load_optimizer(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizer's state. Raises CheckpointError if it can't be read or is of another model."""
        self.optimizer.load_state(checkpoint.optimizer_state())

    def reset_optimizer(self) -> None:
        """Forget the moments and the number of steps, as after a warm start."""
        self.optimizer.reset()

    @torch.no_grad()
    def logits(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [P, V] that predict the segments' sampled tokens."""
        return self._forward(PackedRow.of(segments, self._device, waste=self._waste))

    def step(
        self,
        samples: Sequence[TrainingSample],
        version: int,
        on_micro_batch: OnMicroBatch | None = None,
        rate: float | None = None,
    ) -> StepResult:
        """Take the step from `version` to `version + 1` on these samples, with the learning rate `rate` or the schedule's.

        `on_micro_batch(done, total)` is called after each micro-batch. Raises TrainingDivergedError if the loss, a
        log-probability or the gradient is not finite (the weights are then unchanged), or if a weight is not finite after
        the step.
        """
        used = [s for s in samples if s.has_gradient or not self._skip_zero_advantage]
        normalizer = len(samples)
        if self._config.loss_normalization == "tokens":
            normalizer = sum(s.sampled_count for s in samples) or sum(s.supervised_count for s in samples) or 1
        micro_batches, sums = self._differentiate(used, version, normalizer, on_micro_batch)
        loss = float(sums.loss)
        metrics, rate, stepped = self._decide(sums.stats, loss, rate or learning_rate(self._config, version))
        cosine = self.optimizer.cosine() if stepped and self._config.gradient_cosine else None
        norm = self.optimizer.step(learning_rate=rate, max_grad_norm=self._config.max_grad_norm) if stepped else None
        tokens, trained = sum(s.length for s in used), sum(s.sampled_count + s.supervised_count for s in used)
        return StepResult(
            stepped=stepped,
            samples=len(samples),
            samples_skipped=len(samples) - len(used),
            tokens_trained=trained,
            tokens_context=tokens - trained,
            tokens_forwarded=sums.forwarded,
            micro_batches=micro_batches,
            packing_efficiency=sums.forwarded / sums.cells if sums.cells else None,
            loss=loss,
            metrics=metrics,
            learning_rate=rate,
            grad_norm=norm,
            gradient_cosine=cosine,
        )

    def _differentiate(
        self, used: Sequence[TrainingSample], version: int, normalizer: int, on_micro_batch: OnMicroBatch | None
    ) -> tuple[int, Sums]:
        """Compute the gradient of the step. Returns the number of micro-batches, and their sums."""
        budget = self._config.micro_batch_tokens
        if self._forward.padded:
            bins = padded_bins(segment_lengths(used), budget)
        else:
            bins = pack_shared([sample.segments for sample in used], budget, self._least_shared)
        batches = [[used[index] for index in indices] for indices in bins]
        return len(batches), self._accumulate_all(batches, len(batches), version, normalizer, on_micro_batch)

    def _decide(self, stats: OnPolicyStats, loss: float, rate: float) -> tuple[dict[str, Any] | None, float, bool]:
        """The metrics of the step, its learning rate, and whether it is taken.

        With `trainer.ess_lr: sqrt`, the rate is multiplied by the root of the batch's effective sample size. The
        variance of an importance-weighted gradient equals the variance of an on-policy batch of ESS times the size, and
        AdamW's learning rate scales with the square root of the batch size (VCPO, arXiv 2602.17616). VCPO divides by the ESS
        of on-policy data, which is 1 for the weights pi / mu.
        """
        try:
            metrics = stats.result()
        except ValueError as error:
            raise TrainingDivergedError(f"{error}: the weights or the engine's log-probabilities are broken") from error
        if not math.isfinite(loss):
            raise TrainingDivergedError(f"the loss is {loss}: lower trainer.learning_rate, or check the rewards")
        ess = 1.0 if metrics is None else metrics["ess"]
        rate *= math.sqrt(ess) if self._config.ess_lr == "sqrt" else 1.0
        return metrics, rate, metrics is None or ess >= self._config.ess_threshold

    def _accumulate_all(
        self,
        batches: Iterable[Sequence[TrainingSample]],
        total: int,
        version: int,
        normalizer: int,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> Sums:
        """Set the gradient of the `total` micro-batches."""
        self.optimizer.zero_grad()
        sums = Sums(torch.zeros((), device=self._device, dtype=torch.float64))
        for done, samples in enumerate(batches, start=1):
            self._accumulate(samples, version, normalizer, sums)
            self.optimizer.accumulate()
            if on_micro_batch is not None:
                on_micro_batch(done, total)
        return sums

    def _accumulate(self, samples: Sequence[TrainingSample], version: int, normalizer: int, sums: Sums) -> None:
        """Forward and backward of one micro-batch."""
        batch = MicroBatch.of(
            samples, version=version, device=self._device, waste=self._waste, least_shared=self._least_shared
        )
        reference_logprobs_N = self._reference_logprobs(batch)
        logprobs_P, entropy_P = self._row_logprobs(batch.row)
        logprobs_N, entropy_N = batch.of_sampled(logprobs_P), batch.of_sampled(entropy_P)
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            behaviour_logprobs_N=batch.behaviour_logprobs_N,
            advantages_N=batch.advantages_N,
            lags_N=batch.lags_N,
            sequence_N=batch.sequence_N,
            sequence_count=batch.sequence_count,
            reference_logprobs_N=reference_logprobs_N,
        )
        output = self._loss(inputs)
        total = output.loss_N.sum()
        if batch.supervised is not None:
            places_C, weights_C = batch.supervised
            total = total - (weights_C * logprobs_P[places_C]).sum()
        part = total / normalizer
        part.backward()  # type: ignore[no-untyped-call]
        log_ratio_N = inputs.log_ratio_N.detach()
        sums.stats.add(
            log_ratio_N,
            output.masked_N,
            output.truncated_N,
            entropy_N,
            batch.lags_N,
            inputs.sums_by_sequence(torch.ones_like(batch.sequence_N))[batch.sequence_N],
            inputs.sums_by_sequence(log_ratio_N)[batch.sequence_N],
        )
        sums.loss += part.detach()
        sums.forwarded += batch.row.length
        sums.cells += batch.row.cells

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        """Of the reference model of a KL term (N,)."""
        return batch.reference_logprobs_N
