"""RoPE as torch ops: launcher, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator_pipe, triton_accumulator
from nearlight.ops.rope.kernels import _rope_kernel, config

Pair = tuple[torch.Tensor, torch.Tensor]


def launch(
    is_transposed: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    rotary_dim: int,
    heads_dim: int,
    *,
    is_in_place: bool = False,
) -> Pair:
    """Return q and k turned, or turned back where `is_transposed`; arguments as in `rope`."""
    # empty_like keeps the order of memory: attention gets what its projection wrote.
    q_out, k_out = (q, k) if is_in_place else (torch.empty_like(q), torch.empty_like(k))
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    s, h = 3 - heads_dim, heads_dim
    tokens, heads, key_heads = q.shape[s], q.shape[h], k.shape[h]
    rest = 0 if is_in_place else q.shape[3] - rotary_dim
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    positions_strides = (0, 0)
    if position_ids is not None:
        _check_positions(position_ids, cos.shape[0])
        positions_strides = (_batch_stride(position_ids), position_ids.stride(1))
    tile = config((tokens, heads, key_heads, rotary_dim // 2), q.dtype, launch_gpu(q.device))
    num_head_tiles = triton.cdiv(heads, tile.block_h) + triton.cdiv(key_heads, tile.block_hk)
    _rope_kernel[(q.shape[0] * triton.cdiv(tokens, tile.block_s) * num_head_tiles,)](
        *(q, k, q_out, k_out, cos, sin, position_ids),
        *(tokens, cos.shape[-2], heads, key_heads),
        *(x.stride(dim) for x in (q, k, q_out, k_out) for dim in (0, s, h, 3)),
        *(_batch_stride(cos) if cos.ndim == 3 else 0, cos.stride(-2)),
        *positions_strides,
        HALF=rotary_dim // 2,
        REST=rest,
        INTERLEAVED=interleaved,
        IS_FULL=cos.shape[-1] == rotary_dim,
        IS_TRANSPOSED=is_transposed,
        SHARE_ANGLES=tile.share_angles,
        ACC=triton_accumulator(q.dtype),
        BLOCK_S=tile.block_s,
        BLOCK_H=tile.block_h,
        BLOCK_HK=tile.block_hk,
        BLOCK_HALF=tile.block_half,
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        num_warps=tile.num_warps,
    )
    return q_out, k_out


def _check_positions(position_ids: torch.Tensor, num_rows: int) -> None:
    """Raise where that costs no synchronisation; on CUDA the kernel reads NaN."""
    if position_ids.is_cpu:
        low, high = int(position_ids.min()), int(position_ids.max())
        if low < -num_rows or high >= num_rows:
            raise IndexError(
                f"rope: position_ids from {low} to {high}; the tables have {num_rows} rows"
            )


def _batch_stride(table: torch.Tensor) -> int:
    return 0 if table.shape[0] == 1 else table.stride(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, _, *tables, ctx.interleaved, ctx.rotary_dim, ctx.heads_dim = inputs
    ctx.save_for_backward(*tables)


def _differentiate(transposed: Callable[..., Pair], ctx: Any, *upstream: Any) -> tuple[Any, ...]:
    options = (ctx.interleaved, ctx.rotary_dim, ctx.heads_dim)
    return *transposed(*upstream, *ctx.saved_tensors, *options), *[None] * 6


def cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count q, k and the angles read and the outputs written once."""
    q, k, cos, sin, position_ids, *_ = args
    return Cost(
        flops={accumulator_pipe(q.dtype): 3 * (q.numel() + k.numel())},
        bytes_read=tensor_bytes(q) + tensor_bytes(k) + angle_bytes(cos, sin, position_ids),
        bytes_written=sum(tensor_bytes(output) for output in outputs),
    )


def angle_bytes(cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None) -> int:
    """Return the bytes read of the tables and the positions."""
    table_bytes = tensor_bytes(cos) + tensor_bytes(sin)
    if position_ids is None:
        return table_bytes
    # No more rows than are asked for.
    gathered_bytes = 2 * position_ids.numel() * cos.shape[-1] * cos.element_size()
    return min(table_bytes, gathered_bytes) + tensor_bytes(position_ids)


ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved, int rotary_dim, int heads_dim"
)
_SCHEMA = f"(Tensor q, Tensor k, {ARGUMENTS}) -> (Tensor, Tensor)"
# The map is linear and each op is the other's transpose.
forward_op: Callable[..., Pair] = register_op(
    "rope_fwd" + _SCHEMA,
    partial(launch, False),
    fake=lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
    cost=cost,
    backward=lambda ctx, dq, dk: _differentiate(backward_op, ctx, dq, dk),
    save=_save,
    is_static=True,
)
backward_op: Callable[..., Pair] = register_op(
    "rope_bwd" + _SCHEMA,
    partial(launch, True),
    fake=lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
    cost=cost,
    backward=lambda ctx, q, k: _differentiate(forward_op, ctx, q, k),
    save=_save,
    is_static=True,
)
