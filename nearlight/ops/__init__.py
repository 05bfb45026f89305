"""The ops: one file or folder each, its public function of the same name, its record in `OPS`.

The imports are eager because a function and its module share a name: once a submodule has been
imported, only an assignment after it leaves the function under that name.

Each op has a gradient by its kernel, and forward-mode derivatives (`torch.func.jvp`, `jacfwd`,
`hessian`) by plain PyTorch alone: `backend="auto"` takes it there, a kernel asked for is refused.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from nearlight.core.backend import Choice, choose
from nearlight.core.op import Op
from nearlight.ops.adamw import adamw as adamw
from nearlight.ops.add_layer_norm import add_layer_norm as add_layer_norm
from nearlight.ops.add_rms_norm import add_rms_norm as add_rms_norm
from nearlight.ops.cross_entropy import cross_entropy as cross_entropy
from nearlight.ops.dropout import dropout as dropout
from nearlight.ops.dropout_add import dropout_add as dropout_add
from nearlight.ops.embedding import embedding as embedding
from nearlight.ops.geglu import geglu as geglu
from nearlight.ops.gelu import gelu as gelu
from nearlight.ops.group_norm import group_norm as group_norm
from nearlight.ops.layer_norm import layer_norm as layer_norm
from nearlight.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from nearlight.ops.linear_log_prob import linear_log_prob as linear_log_prob
from nearlight.ops.log_softmax import log_softmax as log_softmax
from nearlight.ops.relu2 import relu2 as relu2
from nearlight.ops.rms_norm import rms_norm as rms_norm
from nearlight.ops.rope import packed_positions as packed_positions
from nearlight.ops.rope import rope as rope
from nearlight.ops.rope import rope_tables as rope_tables
from nearlight.ops.silu import silu as silu
from nearlight.ops.softmax import softmax as softmax
from nearlight.ops.swiglu import swiglu as swiglu

# Every function above has its record in its module.
OPS: dict[str, Op] = {
    name: sys.modules[f"{__name__}.{name}"].OP
    for name, value in list(globals().items())
    if callable(value) and f"{__name__}.{name}" in sys.modules
}

__all__ = ["OPS", "explain", "packed_positions", "rope_tables", *OPS]


def explain(op: str | Callable[..., Any], *args: Any, backend: str = "auto") -> Choice:
    """Say which backend a call of an op would take, and why, without running it.

    Args:
        op: an op or its name.
        args: the call's arguments; the first tensor's device decides.
        backend: as the call would pass it.

    Returns:
        The choice: `backend` and `reason`.

    Raises:
        ValueError: no such op, or no tensor among the arguments.

    Example:
        >>> import torch
        >>> explain("rms_norm", torch.ones(2, 8)).backend
        'reference'
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS:
        raise ValueError(f"explain: no op {name!r}; there are {', '.join(OPS)}")
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
    if tensor is None:
        raise ValueError(f"explain: {name} takes tensors and none was given")
    return choose(backend, tensor)
