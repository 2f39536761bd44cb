"""Whether tokenizer, chat template, generation config and model agree on the vocabulary and on what ends a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipelinerl.errors import ModelLoadError


class Contract(NamedTuple):
    """`stop_token_ids`: all tokens that end a completion, ascending. `notes`: a line for each thing that does not agree."""

    stop_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


def read_contract(model: Any, tokenizer: Any, max_length: int | None = None) -> Contract:
    """`model` needs only a `config`, and a `generation_config` if there is one. Raises ModelLoadError for ids that are none.

    `max_length`: the longest sequence that the user asks for.
    A completion ends with the tokens that the generation config, the model's config and the tokenizer name, and with the
    token by which the chat template ends an answer: base models and fine-tuned ones often name only the end of a text.
    """
    text_config = model.config.get_text_config()
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    owners = {
        "generation_config.json": getattr(model, "generation_config", None),
        "config.json": text_config,
        "the tokenizer": tokenizer,
    }
    eos = {where: _ids(where, getattr(owner, "eos_token_id", None)) for where, owner in owners.items()}
    sources = {token: where for where, ids in reversed(eos.items()) for token in ids}
    notes, size, unmarked = list[str](), int(text_config.vocab_size), ""
    if getattr(tokenizer, "chat_template", None):
        try:
            end, unmarked = read_turn(tokenizer, added)
        except ValueError as error:
            notes.append(f"the chat template can't show an answer, so what ends a turn is not known: {error}")
        else:
            if end is not None and end not in sources:
                name = named(tokenizer, [end])
                notes.append(
                    f"the chat template ends an answer with {name}, which no eos_token_id names: it ends completions, too"
                )
                sources[end] = "the chat template"
    inside = tuple(sorted(token for token in sources if 0 <= token < size))
    special = {*added, *tokenizer.all_special_ids} if added else sources
    if odd := [token for token in sorted(sources) if token not in inside or token not in special]:
        where = ", ".join(dict.fromkeys(sources[token] for token in odd))
        notes.append(
            f"stop tokens are not special tokens of model and tokenizer: {named(tokenizer, odd)} (of {where}); does one of "
            "these belong to another model?"
        )
    if unmarked:
        ends, shown = named(tokenizer, inside) or "nothing", repr(unmarked[:_SHOWN_CHARACTERS])
        notes.append(f"the chat template has no token at the end of an answer, only {shown}: completions end with {ends}")
    if more := [token for token in sorted(added) if token >= size]:
        which = f"tokens beyond the model's vocabulary of {size}: {named(tokenizer, more)}"
        notes.append(f"the tokenizer has {which}; prompts with them are refused")
    if not inside:
        notes.append(
            "no token ends a completion: neither generation_config.json nor config.json nor the tokenizer has an "
            "eos_token_id; each one runs to its limit"
        )
    trained = getattr(text_config, "max_position_embeddings", None)
    if max_length and trained and max_length > trained > 0:
        notes.append(
            f"engine.max_length {max_length} is more than the {trained} positions that the model was made for "
            "(max_position_embeddings): what it writes beyond them may be poor"
        )
    return Contract(inside, tuple(notes))


def _ids(where: str, given: object) -> list[int]:
    try:
        ids = [] if given is None else msgspec.convert(given, int | list[int])
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"eos_token_id of {where} must be a token id, or a list of ids, but is {given!r}") from error
    return [ids] if isinstance(ids, int) else ids


ANSWER = "@@"
"""Stands for an answer of the model where a chat template is tried."""
_SHOWN_CHARACTERS = 20


def read_turn(tokenizer: Any, added: dict[int, Any]) -> tuple[int | None, str]:
    """How the chat template ends an answer: with a token, or else with this text.

    Renders an answer, also with a message after it: some templates end only one of the two. Raises ValueError, with the
    problem, if it can't.
    """
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}
    found, problem = list[str](), "it leaves the answer out"
    for chat in ([question, answer], [question, answer, question]):
        try:
            _, shown, after = str(tokenizer.apply_chat_template(chat, tokenize=False)).rpartition(ANSWER)
        except Exception as error:  # noqa: BLE001 - a template is code and may raise anything
            problem = " ".join(str(error).split())
            continue
        found += [after.lstrip()] if shown else []
    if not found:
        raise ValueError(problem)
    text = next(filter(None, found), "")
    ends = {token.content: number for number, token in added.items() if token.content and text.startswith(token.content)}
    return (ends[max(ends, key=len)], "") if ends else (None, text)


def named(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first tokens with their ids, and how many more there are; of a token that the tokenizer lacks, the id alone."""
    shown = []
    for token in tokens[:2]:
        known = token >= 0 and hasattr(tokenizer, "convert_ids_to_tokens")
        text = tokenizer.convert_ids_to_tokens(token) if known else None
        shown.append(str(token) if text is None else f"{text!r} ({token})")
    return ", ".join(shown) + (f" and {len(tokens) - 2} more" if len(tokens) > 2 else "")
