"""What rows hold after their sequence has ended: who may read it, what is given away first, and that it is what it says."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import Move
from pipelinerl.engine.contents import NO_PREFIX, SHORTEST, Prefix
from pipelinerl.engine.rows import RowTable, Sequence
from pipelinerl.engine.static import SlotTable, StaticEngine
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from tests.parity.models import make_model
from tests.unit.engine.engine_parts import serve, update_of

ENGINES = pytest.mark.parametrize("kind", [LocalEngine, StaticEngine])
PROMPT = tuple(range(10, 40))


def ask(name: str, prompt: tuple[int, ...], reuses_from: int | None = 0, max_tokens: int = 6) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerationRequest(id=name, prompt_ids=prompt, sampling=sampling, reuses_from=reuses_from)


def prefilled(engine: LocalEngine, *requests: GenerationRequest) -> tuple[int, list[Completion]]:
    """The prompt tokens that the engine computes for these requests, at once; and their completions."""
    before = engine.progress().prefilled_tokens
    done = serve(engine, requests)
    return engine.progress().prefilled_tokens - before, [done[request.id] for request in requests]


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.prompt_versions]


def make(kind: type[LocalEngine], **options: Any) -> LocalEngine:
    return kind(make_model("llama"), **{"slots": 4, "max_length": 96} | options)


@ENGINES
def test_a_turn_computes_what_is_new_and_the_last_sampled_token(kind: type[LocalEngine]) -> None:
    engine = make(kind)
    assert prefilled(engine, ask("a", PROMPT))[0] == 30
    (first,) = prefilled(engine, ask("b", PROMPT))[1]
    prompt = (*PROMPT, *first.token_ids, 50, 51, 52)
    count, (second,) = prefilled(engine, ask("c", prompt))
    assert (count, spans(second)) == (4, [(0, 0, 39)])
    assert prefilled(engine, ask("d", prompt[: SHORTEST + 20]))[0] == 1


@ENGINES
def test_attempts_that_begin_later_share_a_prompt_with_those_in_progress(kind: type[LocalEngine]) -> None:
    engine = make(kind, slots=2)
    count, done = prefilled(engine, *(ask(f"a{i}", PROMPT, max_tokens=4 + 3 * i) for i in range(6)))
    shared_by_two = 30 if kind is LocalEngine else 31
    assert count == shared_by_two + 4
    assert len({one.token_ids[:4] for one in done}) == 1


@ENGINES
def test_who_may_read(kind: type[LocalEngine]) -> None:
    """Nobody what is older than it wants, and nobody what a request does not share, or shares nothing with."""
    engine = make(kind)
    prefilled(engine, ask("a", PROMPT))
    engine.update_weights(update_of(1, version=3))
    assert prefilled(engine, ask("b", PROMPT, reuses_from=None))[0] == 30
    count, (old,) = prefilled(engine, ask("c", (*PROMPT[:20], 5, 6), reuses_from=0))
    assert (count, spans(old)) == (2, [(0, 0, 20), (3, 20, 22)])
    assert prefilled(engine, ask("d", PROMPT, reuses_from=1))[0] == 30
    count, (new,) = prefilled(engine, ask("e", (*PROMPT[:25], 5, 6), reuses_from=3))
    assert (count, spans(new)) == (2, [(3, 0, 27)])
    assert prefilled(engine, ask("f", PROMPT[: SHORTEST - 1]))[0] == SHORTEST - 1
    engine.restart()
    assert prefilled(engine, ask("g", PROMPT))[0] == 30


@ENGINES
def test_after_an_update_that_recomputes_only_sequences_in_progress_can_be_read(kind: type[LocalEngine]) -> None:
    engine = make(kind, kv_on_update="recompute")
    other = tuple(range(50, 90))
    prefilled(engine, ask("ended", other))
    engine.submit(ask("long", PROMPT, max_tokens=60))
    engine.step()
    engine.update_weights(update_of(1, version=1))
    engine.submit(ask("a", PROMPT))
    engine.submit(ask("b", other))
    before = engine.progress().prefilled_tokens
    done = {}
    while "a" not in done or "b" not in done:
        done |= {one.request_id: one for one in engine.step().finished}
    assert engine.progress().prefilled_tokens - before <= 1 + 1 + 40
    assert spans(done["a"]) == [(1, 0, 30)]


@ENGINES
@pytest.mark.parametrize(("number", "held"), [(0, True), (1, False), (2, True), (3, True)])
def test_the_row_that_was_released_longest_ago_is_given_away_first(kind: type[LocalEngine], number: int, held: bool) -> None:
    engine = make(kind, slots=3)
    prompts = [tuple(range(10 + i, 40 + i)) for i in range(4)]
    sampled = [prefilled(engine, ask(f"{i}", prompts[i]))[1][0].token_ids for i in range(3)]
    prefilled(engine, ask("next turn", (*prompts[0], *sampled[0], 5)))
    prefilled(engine, ask("3", prompts[3]))
    assert prefilled(engine, ask("again", (*prompts[number], 5)))[0] == (1 if held else 31)


class Cache:
    """A cache whose rows hold the token at each position; the copies of it, as of `attention.Slots.move`."""

    def __init__(self, rows: int, length: int) -> None:
        self.ids = np.zeros((rows, length), dtype=np.int64)

    def move(self, moves: Seq[Move]) -> None:
        read = [(move, self.ids[move.sources, : move.length].copy()) for move in moves]
        for move, content in read:
            self.ids[move.targets, : move.length] = content


@pytest.mark.parametrize("kind", [RowTable, SlotTable])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_what_they_are_said_to_hold(kind: type[RowTable], seed: int) -> None:
    """Whatever begins, grows and ends: sequences keep their tokens, and free rows those that a later prompt may read."""
    draw, rows = random.Random(seed), 7
    table, cache = kind(rows, 200), Cache(rows, 200)
    running: list[Sequence] = []
    reused = 0
    stems = [tuple(draw.randrange(100) for _ in range(40)) for _ in range(3)]
    ended = list(stems)
    for step in range(300):
        table.flush()
        for sequence in [one for one in running if draw.random() < 0.15 or table.counts[one.row] == 50]:
            prompt, count = sequence.request.prompt_ids, int(table.counts[sequence.row])
            table.release(sequence, (VersionSpan(0, 0, len(prompt) + count - 1),))
            ended.append((*prompt, *table.tokens[sequence.row, :count].tolist()))
            running.remove(sequence)
        fresh = dict[Sequence, Prefix]()
        for i in range(min(table.free, draw.randrange(3))):
            stem = draw.choice(ended[-6:] + stems)
            prompt = (*stem[: draw.randrange(17, len(stem) + 1)], *range(3))[:120]
            prefix = table.contents.longest(prompt[:-1], 0, None) or NO_PREFIX
            fresh[Sequence(ask(f"{step}.{i}", prompt, max_tokens=60), key=0)] = prefix
            assert tuple(cache.ids[prefix.row, : prefix.length]) == prompt[: prefix.length]
            reused += prefix.length
        if isinstance(table, SlotTable):
            cache.move(table.admit(fresh, draw.choice([3, rows])))
            if not fresh and table.used < 4 and draw.random() < 0.3:
                cache.move(table.gather_below(4))
        else:
            cache.move(table.compact(fresh))
        for sequence, prefix in fresh.items():
            prompt, known = sequence.request.prompt_ids, prefix.length
            assert tuple(cache.ids[sequence.row, :known]) == prompt[:known]
            cache.ids[sequence.row, known : len(prompt)] = prompt[known:]
            sequence.prompt_versions = (VersionSpan(0, 0, len(prompt)),)
            table.start_decoding(sequence)
            table.positions[sequence.row] = len(prompt) - 1
            running.append(sequence)
        for sequence in running:  # a token each: the one before gets its keys and values
            row, prompt, count = sequence.row, sequence.request.prompt_ids, int(table.counts[sequence.row])
            if count:
                cache.ids[row, len(prompt) + count - 1] = table.tokens[row, count - 1]
            table.tokens[row, count] = draw.randrange(100)
            table.counts[row] += 1
            table.positions[row] += 1
            tokens = (*prompt, *table.tokens[row, :count].tolist())
            assert tuple(cache.ids[row, : len(tokens)]) == tokens
        for row in range(rows):
            known = int(table.contents.known[row])
            assert cache.ids[row, :known].tolist() == table.contents.ids[row, :known].tolist()
    assert reused > 1000
