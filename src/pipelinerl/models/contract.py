"""Whether tokenizer, chat template, generation config and model agree on the vocabulary and on what ends a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    notes += _odd_stop_tokens(tokenizer, odd, inside, size)
    if unmarked:
        ends, shown = named(tokenizer, inside) or "nothing", repr(unmarked[:_SHOWN_CHARACTERS])
        notes.append(f"the chat template has no token at the end of an answer, only {shown}: completions end with {ends}")
    if more:
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


# ---- How a chat template ends an answer of the model


ANSWER = "@@"
"""Stands for an answer of the model where a chat template is tried."""
_SHOWN_CHARACTERS = 20


class TurnEnd(NamedTuple):
    """How the chat template ends an answer: with the token `end`, or with `text`. `notes`: what is wrong with it."""

    end: int | None = None
    text: str = ""
    notes: tuple[str, ...] = ()


def read_turn(tokenizer: Any, added: dict[int, Any]) -> TurnEnd:
    """Render an answer, also with a message after it: some templates end only one of the two."""

    def render(*messages: tuple[str, str], prompt: bool = False) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))

    question = ("user", "?")
    found, problem = list[tuple[str, str]](), "it leaves the answer out"
    with_prompt = without = ""
    for chat in ([question, ("assistant", ANSWER)], [question, ("assistant", ANSWER), question]):
        try:
            before, shown, after = render(*chat).rpartition(ANSWER)
            with_prompt, without = render(question, prompt=True), render(question)
        except Exception as error:  # noqa: BLE001 - a template is code and may raise anything
            problem = " ".join(str(error).split())
            continue
        if shown:
            found.append((before, after.lstrip()))
    if not found:
        return TurnEnd(notes=(f"the chat template can't show an answer, so what ends a turn is not known: {problem}",))
    notes = []
    opening = found[0][0].removeprefix(without).strip()
    if with_prompt == without and opening and found[0][0].startswith(without):
        notes.append(
            f"the chat template has no generation prompt: a prompt ends before {opening!r}, which the model has to write"
        )
    text = next((after for _, after in found if after), "")
    ends = {token.content: number for number, token in added.items() if token.content and text.startswith(token.content)}
    return TurnEnd(ends[max(ends, key=len)] if ends else None, "" if ends else text, tuple(notes))


def _odd_stop_tokens(tokenizer: Any, odd: Mapping[int, str], inside: Sequence[int], size: int) -> list[str]:
    """Notes on stop tokens that model or tokenizer lack, or that are not special, with what names them.

    `inside`: the stop tokens in the model's vocabulary, which has `size` tokens.
    """
    notes = []
    for where in dict.fromkeys(odd.values()):
        own = [token for token, source in odd.items() if source == where]
        outside = [token for token in own if token not in inside]
        unknown = [token for token in own if token in inside and _text(tokenizer, token) is None]
        plain = [token for token in own if token not in {*outside, *unknown}]
        for tokens, what in (
            (outside, f"beyond the model's vocabulary of {size}, so without effect"),
            (unknown, "unknown to the tokenizer: does it belong to another model?"),
            (plain, "not special: does the tokenizer belong to another model?"),
        ):
            several, verb = ("", "is") if len(tokens) == 1 else ("s", "are")
            notes += [f"the stop token{several} {named(tokenizer, tokens)} of {where} {verb} {what}"] if tokens else []
    return notes


def named(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first tokens with their ids, and how many more there are; of a token that the tokenizer lacks, the id alone."""
    texts = [_text(tokenizer, token) for token in tokens[:2]]
    shown = [str(token) if text is None else f"{text!r} ({token})" for token, text in zip(tokens, texts, strict=False)]
    shown += [f"{len(tokens) - 2} more"] if len(tokens) > 2 else []
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def _text(tokenizer: Any, token: int) -> Any:
    return tokenizer.convert_ids_to_tokens(token) if token >= 0 and hasattr(tokenizer, "convert_ids_to_tokens") else None
