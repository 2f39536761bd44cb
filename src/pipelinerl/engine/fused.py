"""Operations of an exported graph as one: on a GPU, a kernel that does little costs as much as its launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from pipelinerl.engine.flat import CONVERSIONS, InverseRms

_MULTIPLY = (torch.ops.aten.mul.Tensor,)


def fuse_norms(graph: fx.Graph) -> None:
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
                norm = graph.call_function(F.rms_norm, (given, [size], weight, float(node.target.epsilon)))
            norm.meta = scaled.meta
            scaled.replace_all_uses_with(norm)
    graph.eliminate_dead_code()
