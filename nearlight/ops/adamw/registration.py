"""AdamW as torch ops: the table of tensors, the launcher, schemas, shapes and cost."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.ops.adamw.kernels import EIGHT_BIT, _adamw_fwd_kernel, config

Tensors = list[torch.Tensor]

# Dtypes of a parameter and its gradient, in the order that the kernel numbers them.
PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
)
# How the kernel numbers parameter, gradient and state.
KINDS = {
    (*pair, state): number + (EIGHT_BIT.value if state == torch.uint8 else 0)
    for number, pair in enumerate(PAIRS)
    for state in (torch.uint8, torch.float64 if torch.float64 in pair else torch.float32)
}
# Tables by the pointers in them; a training step has one for each group of parameters.
MAX_TABLES = 64


@dataclass(frozen=True)
class Table:
    """What a launch reads of its tensors, on their device."""

    rows: torch.Tensor
    chunks: torch.Tensor
    kinds: int
    is_aligned: bool
    kept: tuple[torch.Tensor, ...]  # host memory that is copied from, by a graph again and again


_tables: OrderedDict[Any, Table] = OrderedDict()
# A CUDA graph reads its tables as long as it may be replayed, which nobody tells.
_captured: list[Table] = []


def step_in_place(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors,
    lr_tensor: torch.Tensor | None, grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool, seed: int | None,
) -> None:  # fmt: skip
    """Launch a step that writes over parameters and states."""
    flat = [_flat(p, g, m, v)
            for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)]  # fmt: skip
    hyper = (lr, beta1, beta2, eps, weight_decay)
    _launch(flat, flat, steps, (lr_tensor, grad_scale, found_inf), hyper, maximize, seed)
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    for given, used in zip(zip(*lists, strict=True), flat, strict=True):
        for index in (0, 2, 3):
            if used[index] is not given[index]:
                given[index].copy_(used[index])
    # What autograd saved before the step is seen to have changed.
    if not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs])


def step_out_of_place(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors,
    lr_tensor: torch.Tensor | None, grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool, seed: int | None,
) -> tuple[Tensors, Tensors, Tensors]:  # fmt: skip
    """Launch a step that writes new parameters and states."""
    flat = [_flat(p, g, m, v)
            for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)]  # fmt: skip
    new = new_tensors(params, exp_avgs, exp_avg_sqs)
    outs = [(p, p, m, v) for p, m, v in zip(*new, strict=True)]
    hyper = (lr, beta1, beta2, eps, weight_decay)
    _launch(flat, outs, steps, (lr_tensor, grad_scale, found_inf), hyper, maximize, seed)
    return new


def new_tensors(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors
) -> tuple[Tensors, Tensors, Tensors]:
    """Return empty parameters and states; each state lies in memory as its parameter does."""

    def like(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            return torch.empty_like(tensor)
        return torch.empty_strided(
            param.shape, order_of(param), dtype=tensor.dtype, device=tensor.device
        )

    return tuple(  # type: ignore[return-value]  # there are three
        [like(param, tensor) for param, tensor in zip(params, tensors, strict=True)]
        for tensors in (params, exp_avgs, exp_avg_sqs)
    )


def order_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in which a parameter is walked: its own where it has no gaps."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size != 1 and stride != expected:
            expected = -1
            break
        expected *= size
    if expected >= 0 and param.numel():
        return param.stride()
    sizes = (math.prod(param.shape[dim + 1 :]) for dim in range(param.ndim))
    return tuple(sizes)


def _flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return parameter, gradient and states as the same walk over memory; copies where needed."""
    param = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors
    order = order_of(param)
    found = []
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            found.append(tensor.contiguous())
        elif tensor.stride() == order:
            found.append(tensor)
        else:
            copy = torch.empty_strided(param.shape, order, dtype=tensor.dtype, device=tensor.device)
            found.append(copy.copy_(tensor))
    return tuple(found)


@lru_cache(maxsize=256)
def _bits(*numbers: float) -> tuple[int, ...]:
    """Return what a kernel takes for fp64 numbers, whose own type of argument would be fp32.

    The bits of the negative: never so small that Triton took them for a 32-bit integer.
    """
    return struct.unpack(
        f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *(-x for x in numbers))
    )


def _launch(
    inputs: Sequence[tuple[torch.Tensor, ...]],
    outputs: Sequence[tuple[torch.Tensor, ...]],
    steps: Tensors,
    pointers: tuple[torch.Tensor | None, ...],
    hyper: tuple[float, ...],
    maximize: bool,
    seed: int | None,
) -> None:
    """Run the kernel over all tensors that are not empty.

    Args:
        inputs: parameter, gradient and the two states of each, as the same walk over memory.
        outputs: the same; the gradient is not looked at.
        steps: one number each.
        pointers: learning rate, scale of the gradients and whether the step is skipped.
        hyper: learning rate, betas, eps and weight decay.
        maximize: whether gradients are followed upwards.
        seed: of stochastic rounding.
    """
    full = [(given, out, step) for given, out, step in zip(inputs, outputs, steps, strict=True)
            if given[0].numel()]  # fmt: skip
    if not full:
        return
    device = full[0][0][0].device
    gpu = launch_gpu(device)
    kinds = 0
    for kind in {KINDS[p.dtype, g.dtype, m.dtype] for (p, g, m, _), _, _ in full}:
        kinds |= 1 << kind
    tile = config(kinds, gpu)
    table = _table(full, tile.chunk, kinds, device)
    logs = (math.log(beta) if beta else -math.inf for beta in hyper[1:3])
    _adamw_fwd_kernel[(table.chunks.numel(),)](
        table.rows, table.chunks, *pointers, *_bits(*hyper, *logs), seed,
        KINDS=kinds, ALIGNED=table.is_aligned, MAXIMIZE=maximize,
        LOG_LINES=tile.lines.bit_length() - 1, TILES=tile.tiles, num_warps=tile.num_warps,
    )  # fmt: skip


def _table(full: Sequence[Any], chunk: int, kinds: int, device: torch.device) -> Table:
    """Return the table of these tensors, built anew only where a pointer or a size is new."""
    rows = []
    for (p, g, m, v), out, step in full:
        given = p_out, m_out, v_out = p.data_ptr(), m.data_ptr(), v.data_ptr()
        if out[0] is not p:
            p_out, m_out, v_out = out[0].data_ptr(), out[2].data_ptr(), out[3].data_ptr()
        kind = KINDS[p.dtype, g.dtype, m.dtype]
        rows.append((given[0], p_out, g.data_ptr(), given[1], m_out, given[2], v_out,
                     step.data_ptr(), p.numel(), kind))  # fmt: skip
    is_cuda = device.type == "cuda"
    # Another stream may run before a copy on this one is done.
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    key = (device, stream, chunk, *rows)
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    found = _tables.get(key)
    if found is None:
        found = _build(rows, chunk, kinds, device)
        if not is_captured:  # its copy runs when the graph does
            _tables[key] = found
            if len(_tables) > MAX_TABLES:
                _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    if is_captured:
        _captured.append(found)
    return found


def _build(rows: Sequence[Any], chunk: int, kinds: int, device: torch.device) -> Table:
    values = np.array(rows, np.int64)
    counts = -(-values[:, 8] // chunk)
    first = np.cumsum(counts) - counts
    values = np.concatenate([values[:, :9], first[:, None], values[:, 9:]], axis=1)
    chunks = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    host = (torch.from_numpy(np.ascontiguousarray(values)), torch.from_numpy(chunks))
    if device.type == "cuda":
        host = (host[0].pin_memory(), host[1].pin_memory())
    on_device = [tensor.to(device, non_blocking=True) for tensor in host]
    is_aligned = not (values[:, :7] % 16).any()
    return Table(on_device[0], on_device[1], kinds, bool(is_aligned), host)


def step_cost(args: Sequence[Any], kwargs: Any, outputs: Any) -> Cost:
    """Count parameters and states read and written, and gradients read once."""
    params, grads, exp_avgs, exp_avg_sqs = args[:4]
    kept = sum(map(tensor_bytes, (*params, *exp_avgs, *exp_avg_sqs)))
    pipe = "fp64" if any(p.dtype == torch.float64 for p in params) else "fp32"
    return Cost(
        flops={pipe: 16 * sum(p.numel() for p in params)},
        bytes_read=kept + sum(map(tensor_bytes, grads)),
        bytes_written=kept,
    )


_OPTIONS = (
    "Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf, float lr, float beta1, "
    "float beta2, float eps, float weight_decay, bool maximize, int? seed"
)
in_place_op = register_op(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor[] steps, {_OPTIONS}) -> ()",
    step_in_place,
    fake=lambda *args: None,
    cost=step_cost,
)
out_of_place_op = register_op(
    "adamw(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, "
    f"Tensor[] steps, {_OPTIONS}) -> (Tensor[], Tensor[], Tensor[])",
    step_out_of_place,
    fake=lambda params, grads, exp_avgs, exp_avg_sqs, *rest: new_tensors(
        params, exp_avgs, exp_avg_sqs
    ),
    cost=step_cost,
)
