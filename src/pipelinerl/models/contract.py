"""Whether tokenizer, chat template, generation config and model agree on the vocabulary and on what ends a completion."""

from __future__ import annotations

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
        from pipelinerl.models.template import named, read_turn  # noqa: PLC0415 - the demo's model has none

        end, unmarked, found = read_turn(tokenizer, added)
        notes += found
        if end is not None and end not in sources:
            name = named(tokenizer, [end])
            notes.append(
                f"the chat template ends an answer with {name}, which no eos_token_id names: it ends completions, too"
            )
            sources[end] = "the chat template"
    inside = tuple(sorted(token for token in sources if 0 <= token < size))
    special = {*added, *tokenizer.all_special_ids} if added else sources
    odd = {token: where for token, where in sorted(sources.items()) if token not in inside or token not in special}
    more = [token for token in sorted(added) if token >= size]
    if odd or more or unmarked:
        from pipelinerl.models.template import disagreements  # noqa: PLC0415 - as above

        notes += disagreements(tokenizer, odd, more=more, unmarked=unmarked, inside=inside, size=size)
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
