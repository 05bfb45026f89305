"""Which CUDA kernels an op of a CPU trace would be: attention as one op, and its cost.

On a CPU, scaled-dot-product attention falls apart into matrix products and softmax as soon as
dropout, a mask or fp16 is involved. On a GPU it is one kernel each way, so the trace calls an op
of its own that has the outputs, the saved tensors and the cost of those kernels.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.cost import Attention, Cost, Formula, matmul_pipe, register_cost, tensor_bytes

_ATTENTION = re.compile(
    r"nearlight_trace::attention|aten::_scaled_dot_product_(flash|efficient|cudnn)_attention"
)
TORCH_SDPA = F.scaled_dot_product_attention
# Flash and cuDNN attention keep a head in shared memory; wider heads take the unfused path.
MAX_FUSED_HEAD_DIM = 256
# The backward pass computes five matrix products where the forward computes two.
BACKWARD_OVER_FORWARD = 2.5

_library = torch.library.Library("nearlight_trace", "DEF")
_library.define(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal) -> (Tensor, Tensor)"
)
_library.define(
    "attention_bwd(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, bool is_causal) -> (Tensor, Tensor, Tensor)"
)


def plain_name(name: str) -> str:
    """Return the name a reader knows an op by: attention is one op, whichever kernel runs it."""
    if _ATTENTION.match(name) is None:
        return name
    is_backward = name.endswith(("_bwd", "_backward"))
    return "aten::scaled_dot_product_attention" + ("_backward" if is_backward else "")


def attention_backend(dtype: torch.dtype, head_dim: int) -> str:
    """Return the kernel family PyTorch takes on CUDA: "flash", "efficient" or "math".

    "flash" stands for FlashAttention and cuDNN's kernels, which do the same work.
    """
    if dtype == torch.float64 or head_dim > MAX_FUSED_HEAD_DIM:
        return "math"
    return "flash" if dtype in (torch.float16, torch.bfloat16) else "efficient"


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for `F.scaled_dot_product_attention` during a trace, with its signature."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if attention_backend(query.dtype, query.shape[-1]) == "math" or query.ndim < 3:
        # Fake tensors take the composite path: the products and softmax that CUDA runs, too.
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    if query.ndim == 3:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return torch.ops.nearlight_trace.attention_fwd(query, key, value, attn_mask, is_causal)[
            0
        ].squeeze(1)
    return torch.ops.nearlight_trace.attention_fwd(query, key, value, attn_mask, is_causal)[0]


@torch.library.register_fake("nearlight_trace::attention_fwd")
def _attention_fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, _ = q.shape
    # The kernels write (B, S, H, D), so that the projection after them needs no copy.
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


@torch.library.register_fake("nearlight_trace::attention_bwd")
def _attention_bwd_fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, mask, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    grads = torch.ops.nearlight_trace.attention_bwd(grad, *ctx.saved_tensors, ctx.is_causal)
    return (*grads, None, None)


torch.library.register_autograd(
    "nearlight_trace::attention_fwd", _backward, setup_context=_save, lib=_library
)


def attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> int:
    """Return the forward's operations: 2·pairs·(D + Dv) per head; causal kernels skip half."""
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    pairs = queries * keys
    if is_causal:  # query i sees keys 0 … i
        square = min(queries, keys)
        pairs = square * square // 2 + (queries - square) * keys
    return 2 * batch * heads * pairs * (head_dim + v.shape[-1])


# Position of `is_causal` among the arguments of each attention op, by its name.
_FORWARD_OPS = {
    "nearlight_trace::attention_fwd": 4,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
}
_BACKWARD_OPS = {
    "nearlight_trace::attention_bwd": 7,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
}


def _forward_formula(causal_position: int) -> Formula:
    def formula(args: Any, kwargs: Any, outputs: Any) -> Cost:
        q, k, v = args[:3]
        is_causal = _argument(args, kwargs, causal_position)
        return Cost(
            flops={matmul_pipe(q.dtype): attention_flops(q, k, v, is_causal)},
            bytes_read=sum(tensor_bytes(t) for t in args[:4] if isinstance(t, torch.Tensor)),
            bytes_written=sum(map(tensor_bytes, outputs[:2])),
            pattern="attention",
            attention=Attention(q.shape[3], k.shape[2], is_causal, is_backward=False),
        )

    return formula


def _backward_formula(causal_position: int) -> Formula:
    def formula(args: Any, kwargs: Any, outputs: Any) -> Cost:
        q, k, v = args[1:4]
        is_causal = _argument(args, kwargs, causal_position)
        flops = int(BACKWARD_OVER_FORWARD * attention_flops(q, k, v, is_causal))
        return Cost(
            flops={matmul_pipe(q.dtype): flops},
            bytes_read=sum(tensor_bytes(t) for t in args if isinstance(t, torch.Tensor)),
            bytes_written=sum(tensor_bytes(t) for t in outputs[:3] if t is not None),
            num_kernels=3,
            # dq is summed in fp32 beside the row sums of out · grad.
            workspace_bytes=4 * q.numel() + 4 * q.numel() // q.shape[3],
            pattern="attention",
            attention=Attention(q.shape[3], k.shape[2], is_causal, is_backward=True),
        )

    return formula


def _argument(args: Any, kwargs: Any, position: int) -> bool:
    return bool(args[position] if len(args) > position else kwargs.get("is_causal", False))


for _name, _position in _FORWARD_OPS.items():
    register_cost(_name)(_forward_formula(_position))
for _name, _position in _BACKWARD_OPS.items():
    register_cost(_name)(_backward_formula(_position))
