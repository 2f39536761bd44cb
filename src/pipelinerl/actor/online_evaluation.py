"""Evaluations while training goes on: held-out problems between rollouts, in the same engine.

They are no rollouts: neither admission nor the schedule knows of them, so that they are in no count, no round waits for
them and no weights do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipelinerl.actor.evaluation import Answers, Evaluation

logger = logging.getLogger(__name__)


class OnlineEvaluation:
    """Evaluations one at a time, in a share of the engine's slots.

    One is due when the engine's weights reach or pass a multiple of `every`, before `until`, whose weights are evaluated
    after training. It does not hold on to these weights: they change while it is answered, and each token says which
    sampled it. One that is due while another is running is left out and counted, as is one that training does not wait for.
    """

    def __init__(
        self,
        begin: Callable[[int], Answers],
        *,
        every: int,
        until: int,
        slots: int,
        reached: int,
        on_done: Callable[[int, Evaluation], None],
    ) -> None:
        """`begin` makes the answers of the evaluation that begins at a version; `on_done` gets that version and the result.

        What is due up to the version `reached` has taken place.
        """
        self.skipped = 0
        """Evaluations left out since the last one that ended; to be set to 0 by whoever has written that down."""
        self._begin = begin
        self._every = every
        self._until = until
        self._slots = slots
        self._due = reached // every
        self._on_done = on_done
        self._running: tuple[int, Answers] | None = None
        self._ended = 0

    @property
    def running(self) -> int:
        """Answers that are being given."""
        return self._running[1].running if self._running else 0

    @property
    def answered(self) -> int:
        """Over all evaluations: what grows as long as they go on."""
        return self._ended + (self._running[1].done if self._running else 0)

    @property
    def doing(self) -> str:
        """In words; nothing when no evaluation is running."""
        if self._running is None:
            return ""
        version, answers = self._running
        return f"evaluates since version {version}: {answers.done} of {answers.total} held-out problems"

    def turn(self, version: int) -> bool:
        """Between two engine steps: take in answers, begin what is due with the weights of `version`, start answers.

        Returns whether any was started. Raises what `on_done` raises.
        """
        self._collect()
        if version < self._until and version // self._every > self._due:
            self._due = version // self._every
            if self._running is None:
                self._running = (version, self._begin(version))
            else:
                self._skip(f"the evaluation due at version {version} is left out: {self.doing}")
        return self._running is not None and self._running[1].start(self._slots)

    def end(self) -> None:
        """Training is over: give up what is running, if it has not just ended."""
        self._collect()
        if self._running is not None:
            self._skip(f"the evaluation is given up as training is over: {self.doing}")
            self._running[1].cancel()
            self._running = None

    def _collect(self) -> None:
        if self._running is None:
            return
        version, answers = self._running
        answers.collect()
        evaluation = answers.result()
        if evaluation is not None:
            self._running = None
            self._ended += answers.total
            self._on_done(version, evaluation)

    def _skip(self, why: str) -> None:
        self.skipped += 1
        logger.warning("%s", why)
