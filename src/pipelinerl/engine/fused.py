"""Operations of an exported graph as one: on a GPU, a kernel that does little costs as much as its launch."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pipelinerl.engine.flat import CONVERSIONS, InverseRms

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
