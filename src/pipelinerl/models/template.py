"""How a chat template ends an answer of the model, and what else does not agree between model and tokenizer, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ANSWER = "@@"
"""Stands for an answer of the model where a chat template is tried."""
_SHOWN_CHARACTERS = 20


class Turn(NamedTuple):
    """How the chat template ends an answer: with the token `end`, or with `text`. `notes`: what is wrong with it."""

    end: int | None = None
    text: str = ""
    notes: tuple[str, ...] = ()


def read_turn(tokenizer: Any, added: dict[int, Any]) -> Turn:
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
        return Turn(notes=(f"the chat template can't show an answer, so what ends a turn is not known: {problem}",))
    notes = []
    opening = found[0][0].removeprefix(without).strip()
    if with_prompt == without and opening and found[0][0].startswith(without):
        notes.append(
            f"the chat template has no generation prompt: a prompt ends before {opening!r}, which the model has to write"
        )
    text = next((after for _, after in found if after), "")
    ends = {token.content: number for number, token in added.items() if token.content and text.startswith(token.content)}
    return Turn(ends[max(ends, key=len)] if ends else None, "" if ends else text, tuple(notes))


def disagreements(
    tokenizer: Any, odd: Mapping[int, str], *, more: Sequence[int], unmarked: str, inside: Sequence[int], size: int
) -> list[str]:
    """A line for each. `odd`: stop tokens that model or tokenizer lack, or that are not special, with what names them.

    `more`: tokens beyond the model's vocabulary of `size`. `unmarked`: the text that ends an answer in place of a token.
    `inside`: the stop tokens of the model.
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
    if unmarked:
        ends, shown = named(tokenizer, inside) or "nothing", repr(unmarked[:_SHOWN_CHARACTERS])
        notes.append(f"the chat template has no token at the end of an answer, only {shown}: completions end with {ends}")
    if more:
        which = f"tokens beyond the model's vocabulary of {size}: {named(tokenizer, more)}"
        notes.append(f"the tokenizer has {which}; prompts with them are refused")
    return notes


def named(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first tokens with their ids, and how many more there are; of a token that the tokenizer lacks, the id alone."""
    texts = [_text(tokenizer, token) for token in tokens[:2]]
    shown = [str(token) if text is None else f"{text!r} ({token})" for token, text in zip(tokens, texts, strict=False)]
    shown += [f"{len(tokens) - 2} more"] if len(tokens) > 2 else []
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def _text(tokenizer: Any, token: int) -> Any:
    return tokenizer.convert_ids_to_tokens(token) if token >= 0 and hasattr(tokenizer, "convert_ids_to_tokens") else None
