"""An exported graph in compiled pieces: few kernels for each layer, and few compilations.

The graph is split at its attention calls, which write to the cache. What lies between two of them is the same in most
layers but for the weights, which are inputs of a piece: so the pieces of all layers are compiled once, for any number of
tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from pipelinerl.engine.flat import Attention


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
