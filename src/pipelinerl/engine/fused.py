"""Operations of an exported graph as one: on a GPU, a kernel that does little costs as much as its launch."""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from pipelinerl.engine.flat import CONVERSIONS, Attention, InverseRms

_ATEN = torch.ops.aten
_MULTIPLY = (_ATEN.mul.Tensor,)


def join_products(graph: fx.Graph, inputs: list[Tensor]) -> None:
    """Compute linear layers of the same input (queries, keys and values; gate and up) as one product.

    The parameters become parts of a joint tensor: whatever is written to them is in the product, without a copy.
    """
    own = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=False))
    uses = Counter(id(own[used]) for node in graph.nodes for used in node.all_input_nodes if used in own)
    groups: dict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_ATEN.linear.default):
        x, *parts = node.args
        if all(part in own and isinstance(own[part], nn.Parameter) and uses[id(own[part])] == 1 for part in parts):
            groups[x, len(parts), own[parts[0]].dtype].append(node)
    last = list(own)[-1]
    for group in [group for group in groups.values() if len(group) > 1]:
        joint = [group[0].args[0]]
        for column in zip(*(node.args[1:] for node in group), strict=True):
            inputs.append(_join([own[part] for part in column]))
            with graph.inserting_after(last):
                last = graph.placeholder(f"joint_{len(inputs)}")
            last.meta["val"] = torch.cat([part.meta["val"] for part in column])
            joint.append(last)
        sizes = [node.meta["val"].shape[-1] for node in group]
        with graph.inserting_before(group[0]):
            product = graph.call_function(_ATEN.linear.default, tuple(joint))
            parts = graph.call_function(_ATEN.split_with_sizes.default, (product, sizes, -1))
            for i, node in enumerate(group):
                part = graph.call_function(operator.getitem, (parts, i))
                part.meta = node.meta
                node.replace_all_uses_with(part)
    graph.eliminate_dead_code()


def _join(parameters: list[Tensor]) -> Tensor:
    """One tensor of all rows of `parameters`, which become its parts."""
    with torch.inference_mode(False), torch.no_grad():
        joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(joint, [len(one) for one in parameters]), strict=True):
            parameter.data = part
    return joint


def fuse_norms(graph: fx.Graph, _: list[Tensor]) -> None:
    """Compute weight * narrow(x * 1 / rms(x)) as one operation, where a graph has exactly that: seven kernels become one."""
    for node in [node for node in graph.nodes if isinstance(node.target, InverseRms)]:
        x, chain = node.args[0], [node]
        for targets in (_MULTIPLY, CONVERSIONS, _MULTIPLY):
            users = list(chain[-1].users)
            if len(users) == 1 and users[0].target in targets:
                chain.append(users[0])
        if len(chain) != 4 or x not in chain[1].args:
            continue
        scaled, size = chain[3], x.meta["val"].shape[-1]
        weight = next(argument for argument in scaled.args if argument is not chain[2])
        if isinstance(weight, fx.Node) and weight.meta["val"].shape == (size,):
            given = x.args[0] if x.target in CONVERSIONS else x
            with graph.inserting_before(scaled):
                norm = graph.call_function(F.rms_norm, (given, [size], weight, node.target.epsilon))
            norm.meta = scaled.meta
            scaled.replace_all_uses_with(norm)
    graph.eliminate_dead_code()


# ---- An exported graph in compiled pieces: few kernels for each layer, and few compilations


def in_pieces(module: fx.GraphModule, backend: Any) -> tuple[Callable[..., tuple[Tensor]], int]:
    """A function that computes what `module` does, in pieces that are compiled when they are first called; their number.

    Sizes that vary must not be 0 or 1 in a call, and sizes that are equal in the first call must stay equal.
    """
    graph = copy.deepcopy(module.graph)
    _repeat_sizes(graph)
    part, part_of = 0, {}
    for node in graph.nodes:  # parts with odd numbers attend
        attends = isinstance(node.target, Attention)
        part_of[node] = part + attends
        part += 2 * attends
    whole = fx.GraphModule(module, graph)
    split = split_module(whole, whole, part_of.__getitem__, keep_original_order=True)
    pieces: dict[object, Callable[..., Any]] = {}
    for i in range(0, part + 1, 2):
        piece: Any = split.get_submodule(f"submod_{i}")
        if (structure := _structure(piece.graph)) not in pieces:
            shapes = [node.meta["val"].shape for node in piece.graph.find_nodes(op="placeholder")]
            dims = [(place, dim) for place, shape in enumerate(shapes) for dim in range(len(shape))]
            varying = [(place, dim) for place, dim in dims if isinstance(shapes[place][dim], torch.SymInt)]
            pieces[structure] = compiled(piece.forward, varying, backend)
        piece.forward = pieces[structure]
    return split.forward, len(pieces)


def compiled(function: Callable[..., Any], varying: Sequence[tuple[int, int]], backend: Any) -> Callable[..., Any]:
    """`function` of tensors, compiled at its first call. `varying`: inputs and dimensions that differ between calls."""
    run = torch.compile(function, backend=backend, fullgraph=True)

    def call(*inputs: Any) -> Any:
        for i, dim in varying:
            torch._dynamo.mark_dynamic(inputs[i], dim)
        return run(*inputs)

    return call


def _structure(graph: fx.Graph) -> object:
    """What two graphs have in common if they compute the same of inputs of the same kinds."""
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return tuple(
        (node.target, repr(fx.node.map_arg((node.args, node.kwargs), names.__getitem__)))
        if node.op != "placeholder"
        else (str(node.meta["val"].shape), node.meta["val"].dtype)
        for node in graph.nodes
    )


def _repeat_sizes(graph: fx.Graph) -> None:
    """Read the size of a tensor where it is used: pieces take tensors only, since each number would be compiled for."""
    for size in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        for user in list(size.users):
            with graph.inserting_before(user):
                user.replace_input_with(size, graph.node_copy(size, lambda node: node))
    graph.eliminate_dead_code()
