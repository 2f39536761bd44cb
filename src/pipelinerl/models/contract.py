"""Whether tokenizer, chat template, generation config and model agree on the vocabulary and on what ends a completion."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pipelinerl.errors import ModelLoadError

_SHOWN_CHARACTERS = 20


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
    named = {where: _ids(where, getattr(owner, "eos_token_id", None)) for where, owner in owners.items()}
    sources = {token: where for where, ids in reversed(named.items()) for token in ids}
    notes, size, unmarked = list[str](), int(text_config.vocab_size), ""
    if getattr(tokenizer, "chat_template", None):
        from pipelinerl.models.template import read_turn  # noqa: PLC0415 - the demo's model has none

        end, unmarked, found = read_turn(tokenizer, added)
        notes += found
        if end is not None and end not in sources:
            name = _name(tokenizer, end)
            notes.append(
                f"the chat template ends an answer with {name}, which no eos_token_id names: it ends completions, too"
            )
            sources[end] = "the chat template"
    inside = tuple(sorted(token for token in sources if 0 <= token < size))
    for where in dict.fromkeys(sources[token] for token in sorted(sources)):
        own = sorted(token for token, source in sources.items() if source == where)
        outside = [str(token) for token in own if token not in inside]
        special = {*added, *tokenizer.all_special_ids} if added else inside
        odd = [_name(tokenizer, token) for token in own if token in inside and token not in special]
        unknown = [name for name in odd if name.isdecimal()]
        for tokens, what in (
            (outside, f"beyond the model's vocabulary of {size}, so without effect"),
            (unknown, "unknown to the tokenizer: is it that of another model?"),
            ([name for name in odd if name not in unknown], "not special: is the tokenizer that of another model?"),
        ):
            several, verb = ("", "is") if len(tokens) == 1 else ("s", "are")
            notes += [f"the stop token{several} {_some(tokens)} of {where} {verb} {what}"] if tokens else []
    if unmarked:
        ends = _some([_name(tokenizer, token) for token in inside]) or "nothing"
        shown = repr(unmarked[:_SHOWN_CHARACTERS])
        notes.append(f"the chat template has no token at the end of an answer, only {shown}: completions end with {ends}")
    if not inside:
        notes.append(
            "no token ends a completion: neither generation_config.json nor config.json nor the tokenizer has an "
            "eos_token_id; each one runs to its limit"
        )
    if more := [_name(tokenizer, token) for token in sorted(added) if token >= size]:
        which = f"tokens beyond the model's vocabulary of {size}: {_some(more)}"
        notes.append(f"the tokenizer has {which}; prompts with them are refused")
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


def _some(names: list[str]) -> str:
    shown = names if len(names) < 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def _name(tokenizer: Any, token: int) -> str:
    """The token and its id; the id alone if the tokenizer has no such token."""
    text = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
    return str(token) if text is None else f"{text!r} ({token})"
