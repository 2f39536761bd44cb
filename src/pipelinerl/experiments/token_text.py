"""Token ids as text, with the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import ModelLoadError
from pipelinerl.report.series import read_config
from pipelinerl.status.view import one_line

_DECODE_ERRORS = (OverflowError, ValueError, IndexError, KeyError, TypeError)
"""What tokenizers raise for token ids that they do not have."""


class TokenText:
    """Converts tokens to text, including special tokens. Without a tokenizer (`missing` says why), gives ids in brackets."""

    def __init__(self, tokenizer: Any | None = None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.known = tokenizer is not None
        self.missing = missing

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text per token. A character made of several tokens is in the piece of the last one."""
        if self._tokenizer is None:
            return _bracketed(token_ids)
        stream = TextStream(plain_decoder(self._tokenizer, special=True))
        try:
            pieces = [stream.feed((token_id,)) for token_id in token_ids]
            if pieces:
                pieces[-1] += stream.rest()
        except _DECODE_ERRORS:
            return _bracketed(token_ids)
        return pieces

    def text(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of all tokens, with or without special tokens."""
        if self._tokenizer is not None:
            with suppress(*_DECODE_ERRORS):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
        return "".join(_bracketed(token_ids))


def load_token_text(run_dir: Path) -> TokenText:
    """A `TokenText` with the run's tokenizer, or without one if it can't be loaded. Never runs the model's own code.

    A `tokenizer.json` of a checkpoint or of the model takes a moment; otherwise transformers takes seconds and some 300 MB.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - a page needs it only for runs with rollouts

    from pipelinerl.checkpoint import latest_checkpoint  # noqa: PLC0415 - as above
    from pipelinerl.models.folder import resolve_path  # noqa: PLC0415 - as above

    try:
        model = read_config(run_dir).model
        folders = [latest_checkpoint(run_dir)]
        with suppress(ModelLoadError):  # the model was moved; a checkpoint has the same tokenizer
            folders.append(Path(resolve_path(model.path)))
        for folder in folders:
            if folder is not None and (folder / "tokenizer.json").is_file():
                return TokenText(Tokenizer.from_file(str(folder / "tokenizer.json")))
        from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 (loads torch and transformers)

        return TokenText(load_tokenizer(model.model_copy(update={"trust_remote_code": False})))
    except Exception as error:  # noqa: BLE001 - a tokenizer is other people's code; ids are shown, and the reason
        return TokenText(missing=one_line(str(error)))


def _bracketed(token_ids: Sequence[int]) -> list[str]:
    return [f"[{token_id}]" for token_id in token_ids]
