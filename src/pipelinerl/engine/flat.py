"""Runs a model's forward as an exported graph: a flat list of tensor operations.

A Hugging Face model spends much time in Python between tensor operations: module calls, keyword arguments, output objects.
For a small model this is most of a decode step. `torch.export` records the operations of the forward once, for any number of
tokens. They run on the model's own parameters, so a weight update takes effect in the next step.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pipelinerl.engine.attention import AttentionSite, LayerCall

_ATEN = torch.ops.aten
CONVERSIONS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.type_as.default)
_TO_THE_END = 2**62
_TOKENS, _KEPT = 13, 11
"""Sizes to export with. Both become symbolic, so they must not coincide with a size in a real model."""
PACKED_AT_ONCE = 1 << 23
"""Elements of weights that a forward packs before it runs, after an update: no token waits for the packing of all."""
PACK_FROM = 1 << 16
"""Weights of linear layers with at least this many elements are packed: smaller ones gain nothing (call overhead)."""


class FlatForward:
    """Computes logits [P, V] at the indices `keep` [P] of a packed batch [1, T], equal to the model's own forward.

    The model's attention must be `slot_attention`. Raises what `torch.export` raises for a model that it can't export, such
    as one with data-dependent operations.
    """

    def __init__(self, model: nn.Module, *passes: Callable[[fx.Graph, list[Tensor]], None]) -> None:
        """`passes` change the graph (operations of ATen, and `InverseRms`), given the tensors that precede its inputs."""
        calls = _AttentionCalls()
        program = _export(model, calls)
        graph = program.graph_module.graph
        _remove_no_ops(graph)
        _merge_repeated(graph)
        _insert_attention(graph, calls)
        self._inputs = _graph_tensors(program, model)
        for change in (_simplify_rms, *passes):
            change(graph, self._inputs)
        # Copies of weights in the dtype or layout in which the graph uses them. Small models in float32 need none.
        self._converted, self._packed = hoist_conversions(graph, self._inputs), pack_linears(graph, self._inputs)
        self._unpacked: list[PackedLinear] = []
        _use_python_functions(graph)
        graph.eliminate_dead_code()
        graph.lint()
        program.graph_module.recompile()
        self.module = program.graph_module
        self._run: Callable[..., tuple[Tensor]] = self.module.forward
        self.compiled: Callable[..., tuple[Tensor]] | None = None  # see `fused.in_pieces`

    def weights_changed(self) -> None:
        """Must be called after every write to the model's parameters, for the copies in another dtype or layout."""
        with torch.no_grad():
            for weight, copy in self._converted:
                copy.copy_(weight)
        for linear in self._packed:
            linear.drop()
        self._unpacked = list(self._packed)

    def __call__(self, ids_1T: Tensor, positions_1T: Tensor, keep_P: Tensor, batch: AttentionSite) -> Tensor:
        room = PACKED_AT_ONCE if self._unpacked else 0
        while room > 0 and self._unpacked:
            room -= self._unpacked.pop().pack()
        if self.compiled is not None and ids_1T.shape[1] == len(keep_P) > 1:
            # Copies: the compiler would compile again for parts of tensors and for tensors of inference mode.
            return self.compiled(*self._inputs, ids_1T.clone(), positions_1T.clone(), keep_P.clone(), batch)[0]
        return self._run(*self._inputs, ids_1T, positions_1T, keep_P, batch)[0]


class _AttentionCalls:
    """Replaces the `StepBatch` during export and records each layer's attention settings."""

    checked = False
    longest = 1

    def __init__(self) -> None:
        self.noted: list[LayerCall] = []

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.noted.append(call._replace(sinks=None))
        attended: Tensor = _attention_placeholder()(query, key, value, call.sinks, len(self.noted) - 1)
        return attended


class _ModelCall(nn.Module):
    def __init__(self, model: nn.Module, calls: _AttentionCalls) -> None:
        super().__init__()
        self.model = model
        self._calls = calls

    def forward(self, ids_1T: Tensor, positions_1T: Tensor, keep_P: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=ids_1T,
            position_ids=positions_1T,
            # A dummy mask, which our attention ignores, keeps the model from building one.
            attention_mask=torch.zeros(1, 1, 1, 1, device=ids_1T.device),
            use_cache=False,
            logits_to_keep=keep_P,
            slot_batch=self._calls,
        ).logits[0]
        return logits


@cache
def _attention_placeholder() -> Callable[..., Tensor]:
    """A placeholder operator for attention in the exported graph. It is never run."""

    @torch.library.custom_op("pipelinerl::slot_attention", mutates_args=())
    def placeholder(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: int) -> Tensor:
        raise NotImplementedError("this operator is a placeholder")

    @placeholder.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: int) -> Tensor:  # noqa: ARG001 - as above
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

    return placeholder


def _export(model: nn.Module, calls: _AttentionCalls) -> torch.export.ExportedProgram:
    device = next(model.parameters()).device
    positions_1T = torch.arange(_TOKENS, device=device)[None]
    inputs = (torch.zeros_like(positions_1T), positions_1T, torch.arange(_KEPT, device=device))
    sizes = tuple({part.ndim - 1: torch.export.Dim.DYNAMIC} for part in inputs)
    with torch.no_grad(), redirect_stderr(io.StringIO()):  # if it fails, torch prints the graph up to there
        return torch.export.export(_ModelCall(model, calls), inputs, dynamic_shapes=sizes, strict=False)


def _graph_tensors(program: torch.export.ExportedProgram, model: nn.Module) -> list[Tensor]:
    """The tensors that the graph takes before its inputs, in order: parameters and buffers of `model`, and constants."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    tensors: list[Tensor] = []
    for spec in program.graph_signature.input_specs:
        if spec.target is None:  # an input
            continue
        name = spec.target.removeprefix("model.")
        tensors.append(own[name] if name in own else program.constants[spec.target])
    return tensors


# ---- graph passes that remove operations


def _remove_no_ops(graph: fx.Graph) -> None:
    """Remove operations without effect: assertions, conversions to the same dtype, dropout in eval mode, products with 1."""
    for node in list(graph.nodes):
        if node.target in CONVERSIONS:
            before, after = node.args[0].meta["val"], node.meta["val"]
            without_effect = before.dtype == after.dtype and before.device == after.device
        elif node.target is _ATEN.dropout.default:
            without_effect = not node.args[2]
        else:
            without_effect = node.target is _ATEN.mul.Tensor and isinstance(node.args[1], float) and node.args[1] == 1.0
        if without_effect:
            _replace(graph, node, node.args[0])
        elif node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _merge_repeated(graph: fx.Graph) -> None:
    """Merge operations with equal inputs. This is safe because no operation in these graphs writes to its inputs."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op != "call_function" or random or node.target is _attention_placeholder():
            continue
        key = (node.target, _key(node.args), _key(sorted(node.kwargs.items())))
        if key in seen:
            _replace(graph, node, seen[key])
        else:
            seen[key] = node


def _key(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_key(part) for part in value)
    return (type(value), value)


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)


# ---- graph passes that replace operations


def _insert_attention(graph: fx.Graph, calls: _AttentionCalls) -> None:
    """Replace the attention placeholders by the engine's attention. The step's batch becomes the last input."""
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        batch = graph.placeholder("batch")
    placeholder = torch.ops.pipelinerl.slot_attention.default
    for node in list(graph.nodes):
        if node.target is placeholder:
            *tensors, call = node.args
            node.target = Attention(calls.noted[call])
            node.args = (batch, *(tensor for tensor in tensors if tensor is not None))


class Attention:
    """Attention of one layer. It has a `__name__` because the code generated from a graph calls functions by name."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self.__name__ = self.__qualname__ = f"attention_{call.layer}"
        self.__module__ = __name__

    def __call__(
        self, batch: AttentionSite, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        call = self._call if sinks is None else self._call._replace(sinks=sinks)
        return batch.attend(call, query, key, value)


def _use_python_functions(graph: fx.Graph) -> None:
    """Replace ATen operators by the functions of torch's Python API, which have less call overhead."""
    for node in graph.nodes:
        if node.target is not torch.ops.aten.slice.Tensor:
            if node.op == "call_function":
                node.target = _PYTHON_FUNCTIONS.get(node.target, node.target)
            continue
        arguments: list[Any] = [*node.args, *(None, 0, None, None, 1)[len(node.args) :]]
        source, dim, start, end, step = arguments
        dims = source.meta["val"].dim()
        if isinstance(end, int) and end >= _TO_THE_END:
            end = None
        part = slice(start or None, end, None if step == 1 else step)
        node.target = operator.getitem
        node.args = (source, (Ellipsis, part, *[slice(None)] * (dims - 1 - dim % dims)))


def _simplify_rms(graph: fx.Graph, _: list[Tensor]) -> None:
    """Compute 1 / rms(x), that is rsqrt(mean(x^2) + eps), from the norm of x, which takes fewer operations."""
    made: dict[object, InverseRms] = {}
    for rsqrt in [node for node in graph.nodes if node.target is _ATEN.rsqrt.default]:
        chain = [rsqrt]
        for target in (_ATEN.add.Tensor, _ATEN.mean.dim, _ATEN.pow.Tensor_Scalar):
            argument = chain[-1].args[0]
            if isinstance(argument, fx.Node) and argument.target is target and len(argument.users) == 1:
                chain.append(argument)
        if len(chain) < 4:
            continue
        _, add, mean, power = chain
        over_last = list(mean.args[1]) == [-1] and mean.args[2:] == (True,) and not (add.kwargs or mean.kwargs)
        if isinstance(add.args[1], float) and over_last and power.args[1] == 2:
            x, like = power.args[0], rsqrt.meta["val"]
            key = (add.args[1], x.meta["val"].shape[-1], like.dtype, like.device)
            rsqrt.target, rsqrt.args = made.setdefault(key, InverseRms(*key)), (x,)
    graph.eliminate_dead_code()


class InverseRms:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension."""

    def __init__(self, epsilon: float, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.epsilon = epsilon
        self._epsilon = torch.tensor(epsilon, dtype=dtype, device=device)
        self._share = 1 / size
        self.__name__ = self.__qualname__ = "inverse_rms"
        self.__module__ = __name__

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.addcmul(self._epsilon, norm, norm, value=self._share).rsqrt_()


_PYTHON_FUNCTIONS: dict[object, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.cat.default: torch.cat,
    _ATEN.chunk.default: torch.chunk,
    _ATEN.cos.default: torch.cos,
    _ATEN.div.Tensor: torch.div,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.gelu.default: F.gelu,
    _ATEN.layer_norm.default: torch.layer_norm,
    _ATEN.linear.default: F.linear,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.select.int: torch.select,
    _ATEN.silu.default: F.silu,
    _ATEN.sin.default: torch.sin,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.to.dtype: Tensor.to,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
}


# ---- Copies of weights in the dtype or layout in which the operations of an exported graph use them


_PACK_FOR_ROWS = 16


def hoist_conversions(graph: fx.Graph, inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Convert the graph's own tensors once, and not at every step (as for a float32 head).

    Returns each tensor and its copy. The copies are appended to `inputs` as further inputs of the graph.
    """
    own = dict(zip([node for node in graph.nodes if node.op == "placeholder"], inputs, strict=False))
    found: list[tuple[Tensor, Tensor]] = []
    last = list(own)[-1]
    for node in [node for node in graph.nodes if node.target is _ATEN.to.dtype and node.args[0] in own]:
        weight = own[node.args[0]]
        with torch.inference_mode(False), torch.no_grad():  # because it is later written to outside of inference mode
            found.append((weight, weight.to(node.meta["val"].dtype)))
        inputs.append(found[-1][1])
        with graph.inserting_after(last):
            last = graph.placeholder(f"converted_{len(found)}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    return found


class PackedLinear:
    """`F.linear` with a copy of the weight packed for the CPU's kernels: 1.2 to 2.3 times as fast for 1 to 64 rows.

    Packing takes longer than an update, which only drops the copy; the plain weight is used until `pack`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.__name__ = self.__qualname__ = "packed_linear"
        self.__module__ = __name__
        self.pack()

    def drop(self) -> None:
        self._copy: Tensor | None = None

    @torch.no_grad()
    def pack(self) -> int:
        """Returns the number of elements."""
        self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACK_FOR_ROWS)
        return self._weight.numel()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._copy is None:
            return F.linear(x, weight, bias)
        product: Tensor = self._multiply(x, self._copy, bias, "none", [], "")
        return product


def pack_linears(graph: fx.Graph, inputs: list[Tensor]) -> list[PackedLinear]:
    """Replace float32 linear layers on a CPU, with weights of at least `PACK_FROM` elements, by `PackedLinear`."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    own = dict(zip([node for node in graph.nodes if node.op == "placeholder"], inputs, strict=False))
    packed: dict[fx.Node, PackedLinear] = {}
    for node in graph.nodes:
        weight = own.get(node.args[1]) if node.target is _ATEN.linear.default else None
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < PACK_FROM:
            continue
        if node.args[1] not in packed:
            packed[node.args[1]] = PackedLinear(weight)
        node.target = packed[node.args[1]]
    return list(packed.values())
