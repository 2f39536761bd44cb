"""How a chat template ends an answer of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

ANSWER = "@@"
"""Stands for an answer of the model where a chat template is tried."""


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
