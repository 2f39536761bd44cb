"""Loads a Hugging Face causal LM and its tokenizer, with errors that tell the user what to do."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipelinerl.config.schema import LONGEST_SLOT, ModelConfig
from pipelinerl.errors import CheckpointError, ModelLoadError, UnsupportedModelError
from pipelinerl.models.folder import explain, find_model
from pipelinerl.models.state import is_narrow

_log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
"""Subfolder of a checkpoint. If it were beside `model.safetensors`, transformers would load the folder as an adapter."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|(attn|attention)\.(masked_)?bias$|position_ids$|(^|\.)mtp\.|(^|\.)(visual|vision|audio"
    r"|multi_modal)\w*\."
)
"""Names of tensors that files have and a language model computes without: buffers of old versions of transformers, layers
that predict further tokens, and encoders of images and sound."""
_POSITIONS = re.compile(r"(^|\.|embed_)(wpe|pos|positions?)(_[a-z]+)?$")


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> Any:
    """The model in `config.dtype` on `device`, in eval mode: the policy that samples has no dropout, so training has none.

    The model has no adapters; the trainer adds them (`config.lora`). Raises UnsupportedModelError if the model can't have
    the head that `config.head_dtype` asks for, UserError if the device does not exist, and ModelLoadError if the model
    can't be loaded, if its files lack weights (transformers would fill them with random numbers) or have others than the
    model, or if weights are not finite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - takes seconds

    if str(device) != "cpu":
        from pipelinerl.models.device import require_device  # noqa: PLC0415 - every machine has a CPU

        require_device(device)
    options = {"dtype": DTYPES[config.dtype], "trust_remote_code": config.trust_remote_code, "output_loading_info": True}
    path = find_model(config.path)
    with quiet(), _one_line(config.path, "model"):
        _generation_config(path)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(path, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model, report = AutoModelForImageTextToText.from_pretrained(path, **options)  # and used for text alone
    _check_weights(config.path, model, report)
    if config.head_dtype == "float32":
        use_float32_head(model)
    return model.to(device).eval()


def _check_weights(path: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if the files and the model have different weights, or if some are not finite."""
    absent = {*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])}
    unknown = [name for name in report["unexpected_keys"] if not _HARMLESS.search(name)]
    broken = (  # the smallest or the largest element is not finite: neither exists if one is NaN
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not all(math.isfinite(bound) for bound in weight.detach().aminmax())
    )
    for names, problem in (
        (absent, "the weights do not fit its config.json: {} missing or of another shape; get a complete copy of the model"),
        (unknown, "its files have weights that the model has not: {}; merge adapters, or remove what is not of the model"),
        (broken, "weights are not finite (NaN or infinity): {}; give another copy or checkpoint"),
    ):
        if found := sorted(names):
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise ModelLoadError(f"model {path!r}: {problem.format(shown)}")


def load_config(config: ModelConfig) -> Any:
    """An object with the model's `config` and `generation_config` (None without one). Raises ModelLoadError."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    path = find_model(config.path)
    with quiet(), _one_line(config.path, "configuration"):
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        return SimpleNamespace(config=found, generation_config=_generation_config(path))


def _generation_config(path: str) -> Any:
    """None if there is none. One that can't be read is an error: transformers would go on without its stop tokens."""
    from transformers import GenerationConfig  # noqa: PLC0415 - as above

    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:  # whatever is wrong with its contents
        folder = Path(path)
        if not folder.is_dir():
            from pipelinerl.models.folder import downloaded  # noqa: PLC0415 - folders don't need it

            folder = Path(downloaded(path) or path)
        if not (folder / "generation_config.json").exists():
            return None
        raise ValueError(f"its generation_config.json can't be read: {error}") from error


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer. Raises ModelLoadError if it does not exist or can't be read."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only loading needs it

    path = find_model(config.path)
    with quiet(), _one_line(config.path, "tokenizer"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)


def stop_token_ids(model: Any, tokenizer: Any, max_length: int | None = None) -> tuple[int, ...]:
    """All tokens that end a completion, ascending, as `read_contract` finds them. Logs its notes as warnings."""
    from pipelinerl.models.contract import read_contract  # noqa: PLC0415 - the trainer generates nothing

    contract = read_contract(model, tokenizer, max_length)
    for note in contract.notes:
        _log.warning("model: %s", note)
    return contract.stop_token_ids


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError if `folder` is a checkpoint of a run with adapters."""
    if (folder / ADAPTER_FOLDER).exists():
        raise CheckpointError(f"{folder} is from a run that trained adapters; set model.lora to its earlier value to go on")


def learned_positions(model: Any) -> int | None:
    """The positions in the language model's table of positions, the smallest if there are several; None without a table."""
    tables = []
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Embedding) and _POSITIONS.search(name) and not _HARMLESS.search(name):
            # Some count from another number than 0: OPT from 2, RoBERTa from the one after its padding's id.
            first = getattr(part, "offset", 0 if part.padding_idx is None else part.padding_idx + 1)
            tables.append(part.num_embeddings - int(first))
    tables += [len(table) for name, table in model.named_buffers() if name.endswith("embed_positions")]  # GPT-J
    return min(tables, default=None)


def model_max_length(model: Any) -> int | None:
    """The longest sequence of this model in tokens, from its config and its table of positions; None if neither says it."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    table = learned_positions(model) if isinstance(model, torch.nn.Module) else None
    return min((int(most) for most in (limit, table) if most is not None and most >= 1), default=None)


def slot_length(model: Any, asked: int | None) -> int:
    """Longest prompt + completion of a slot, in tokens: `asked`, or else the model's maximum, at most `LONGEST_SLOT`."""
    return asked or min(model_max_length(model) or LONGEST_SLOT, LONGEST_SLOT)


@contextmanager
def _one_line(path: str, what: str) -> Iterator[None]:
    """Turn any exception inside into a ModelLoadError with a message of one line."""
    try:
        yield
    except Exception as error:  # config, weight and hub code raises errors of many types
        raise ModelLoadError(f"can't load the {what} of {path!r}: {explain(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars, warnings and loading reports of transformers inside; restore the settings afterwards."""
    from transformers.utils import logging  # noqa: PLC0415 - as above

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# ---- The output head in float32
# The rounding of engine and trainer differs most in the logits, since bfloat16 has 8 bits for numbers that are then
# exponentiated (MiniMax-M1, arXiv 2506.13585, found the gap between log-probabilities there).


def multiplies_wide(weight: Tensor) -> bool:
    """Whether narrow matrices have a product in float32, which needs no float32 copies of them."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and hasattr(torch.ops.aten.mm, "dtype")


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of two narrow matrices in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


class _WideLinear(torch.autograd.Function):
    """x [T, H], weight [V, H] -> x weight^T in float32. Gradients are computed in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_VH)
        return wide_product(x_TH, weight_VH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_VH = ctx.saved_tensors
        gradient_TV = grads[0].to(weight_VH.dtype)
        of_x = gradient_TV @ weight_VH if ctx.needs_input_grad[0] else None
        return of_x, gradient_TV.t() @ x_TH if ctx.needs_input_grad[1] else None


class Float32Head(nn.Linear):
    """A linear layer that shares the parameters of `head` and computes in float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is not None or not multiplies_wide(self.weight):
            return F.linear(input.float(), self.weight.float(), None if bias is None else bias.float())
        narrow_TH = input.flatten(0, -2)
        if torch.is_grad_enabled():
            wide_TV: Tensor = _WideLinear.apply(narrow_TH, self.weight)  # type: ignore[no-untyped-call]
        else:
            wide_TV = wide_product(narrow_TH, self.weight.t())
        return wide_TV.view(*input.shape[:-1], wide_TV.shape[-1])


def use_float32_head(model: Any) -> None:
    """Make `model` compute its logits in float32. Parameters and names do not change. Does nothing to float32 weights.

    Raises UnsupportedModelError if the output head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output head; set model.head_dtype to null")
    if is_narrow(head.weight.dtype):
        model.set_output_embeddings(Float32Head(head))
