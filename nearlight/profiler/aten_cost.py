"""Flops and bytes of torch's own ops: matrix products, convolutions, gathers, optimizers, streams.

Formulas that need an op's arguments are registered in `core.cost`. Everything else that reads its
inputs once and writes its outputs once is a stream; `is_stream` says for which ops that is a
model and not a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, prod
from typing import Any

import torch

from nearlight.core.cost import Cost, matmul_pipe, register_cost, tensor_bytes

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

# Reductions, normalisations, copies and fills: one pass over inputs and outputs.
_STREAMS = frozenset(
    "sum mean amax amin max min argmax argmin any all var var_mean std norm linalg_vector_norm prod"
    " _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm"
    " native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"
    " _batch_norm_with_update _fused_rms_norm native_dropout native_dropout_backward cat stack"
    " clone copy_ _to_copy contiguous zeros zeros_like new_zeros ones ones_like new_ones full"
    " full_like new_full fill_ zero_ arange linspace scalar_tensor rand rand_like randn randn_like"
    " randint normal_ uniform_ bernoulli_ constant_pad_nd roll flip tril triu tril_ triu_ repeat"
    " repeat_interleave logical_not where max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d"
    " upsample_bilinear2d upsample_nearest2d cumsum cumprod logsumexp one_hot bitwise_and"
    " _foreach_add_ equal _local_scalar_dense glu glu_backward".split()
)
# Passes that need more than one launch on CUDA.
_KERNELS = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 2,
    "native_batch_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "max_pool2d_with_indices_backward": 2,
    "avg_pool2d_backward": 1,
    "_adaptive_avg_pool2d_backward": 1,
    "slice_backward": 2,  # zeros, then a copy into them
    "select_backward": 2,
    "sort": 4,
    "topk": 3,
    "nonzero": 4,
}
# CUDA's multi-tensor apply: elements per block, blocks and tensors per launch (ATen,
# MultiTensorApply.cuh, four lists).
_CHUNK_ELEMENTS, _BLOCKS_PER_LAUNCH, _TENSORS_PER_LAUNCH = 65536, 320, 36


def is_stream(op: torch._ops.OpOverload) -> bool:
    """Return whether "inputs read once, outputs written once" describes the op."""
    name = op._schema.name.removeprefix("aten::")
    return (
        torch.Tag.pointwise in op.tags
        or name in _STREAMS
        or name in _KERNELS
        or name.startswith("_foreach_")
    )


def is_strided(
    op: torch._ops.OpOverload, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> bool:
    """Return whether an element-wise op misses PyTorch's vectorised kernel on CUDA.

    That kernel needs all operands of one shape, dense in one order of dimensions.
    """
    if torch.Tag.pointwise not in op.tags:
        return False
    operands = [tensor for tensor in (*inputs, *outputs) if tensor.ndim > 0]
    layouts = {(tuple(tensor.shape), tensor.stride()) for tensor in operands}
    return len(layouts) > 1 or any(not _is_dense(tensor) for tensor in operands[:1])


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def stream_cost(op: torch._ops.OpOverload, args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    """Return the cost of reading every input once and writing outputs and changed inputs once."""
    changed, read = [], []
    overwritten = op._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_")
    for argument, value in _bound(op, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors = list(tensors_in(value))
        if is_written:
            changed += tensors
        if not (is_written and overwritten):
            read += tensors
    written = {id(t): t for t in (*changed, *tensors_in(outputs))}.values()
    name = op._schema.name.removeprefix("aten::")
    num_lists = max(len(changed), len(list(tensors_in(outputs))))
    kernels = ceil(num_lists / _TENSORS_PER_LAUNCH) if name.startswith("_foreach_") else 1
    main = next(iter(written), None)
    pipe = "fp64" if main is not None and main.dtype == torch.float64 else "fp32"
    return Cost(
        flops={pipe: sum(t.numel() for t in written)} if torch.Tag.pointwise in op.tags else {},
        bytes_read=_total_bytes(read),
        bytes_written=_total_bytes(written),
        num_kernels=_KERNELS.get(name, kernels),
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value, of a list or of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def _bound(op: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _total_bytes(tensors: Any) -> int:
    """Return the bytes of some tensors; one that is named twice is moved once."""
    return sum(tensor_bytes(tensor) for tensor in {id(t): t for t in tensors}.values())


def _tf32_matmul() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _matmul(flops: int, read: Any, written: Any, dtype: torch.dtype) -> Cost:
    return Cost(
        flops={matmul_pipe(dtype, _tf32_matmul()): flops},
        bytes_read=_total_bytes(read),
        bytes_written=_total_bytes(written),
        pattern="matmul",
    )


@register_cost("aten::mm", "aten::bmm", "aten::mv", "aten::_int_mm", "aten::_grouped_mm")
def _mm(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    a, b = args[:2]
    # Every output element is a sum over the shared dimension (grouped: each row meets one group).
    return _matmul(2 * outputs.numel() * a.shape[-1], (a, b), (outputs,), a.dtype)


@register_cost("aten::dot", "aten::vdot")
def _dot(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    a, b = args[:2]
    return Cost({"fp32": 2 * a.numel()}, _total_bytes((a, b)), _total_bytes((outputs,)))


@register_cost("aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_", "aten::addmv")
def _addmm(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    bias, a, b = args[:3]
    return _matmul(2 * outputs.numel() * a.shape[-1], (bias, a, b), (outputs,), a.dtype)


@register_cost("aten::_scaled_mm")
def _scaled_mm(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    read = list(tensors_in(args))  # scales and bias, too
    return _matmul(2 * outputs.numel() * args[0].shape[-1], read, (outputs,), args[0].dtype)


def _convolution_flops(weight: torch.Tensor, small: torch.Tensor) -> int:
    # Each element of the side that is convolved over meets a whole filter.
    return 2 * small.shape[0] * prod(small.shape[2:]) * weight.numel()


def _convolution_pipe(dtype: torch.dtype) -> str:
    return matmul_pipe(dtype, torch.backends.cudnn.allow_tf32)


@register_cost("aten::convolution", "aten::_convolution", "aten::cudnn_convolution")
def _convolution(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    image, weight = args[:2]
    is_transposed = len(args) > 6 and args[6] is True
    flops = _convolution_flops(weight, image if is_transposed else outputs)
    return Cost(
        flops={_convolution_pipe(image.dtype): flops},
        bytes_read=_total_bytes(tensors_in(args[:3])),
        bytes_written=_total_bytes((outputs,)),
        pattern="matmul",
    )


@register_cost("aten::convolution_backward")
def _convolution_backward(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    grad, image, weight = args[:3]
    is_transposed, wanted = args[7], args[10]
    flops = _convolution_flops(weight, image if is_transposed else grad)
    return Cost(
        flops={_convolution_pipe(image.dtype): flops * sum(wanted[:2])},
        bytes_read=_total_bytes((grad, image, weight)),
        bytes_written=_total_bytes(tensors_in(outputs)),
        num_kernels=sum(wanted),
        pattern="matmul",
    )


@register_cost("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
def _gather(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    indices = [t for t in tensors_in(args[1:]) if not t.is_floating_point()]
    moved = tensor_bytes(outputs)  # only the rows that are asked for are read
    return Cost({}, moved + _total_bytes(indices), moved)


@register_cost("aten::embedding_dense_backward")
def _embedding_backward(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    # The gradient of the whole table is written; sorting the indices takes the launches.
    return Cost({}, _total_bytes(args[:2]), tensor_bytes(outputs), num_kernels=6)


@register_cost("aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::index_add_")
def _scatter(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    values = list(tensors_in(args[1:]))
    return Cost({}, _total_bytes(values), _total_bytes(values[-1:]), num_kernels=2)


@register_cost("aten::scatter", "aten::scatter_add", "aten::scatter_", "aten::scatter_add_")
def _scatter_into_copy(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    return Cost({}, _total_bytes(tensors_in(args)), tensor_bytes(outputs))


@register_cost("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def _nll_loss(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    log_probs, labels = args[:2]
    picked = labels.numel() * log_probs.element_size()
    return Cost({}, picked + tensor_bytes(labels), _total_bytes(tensors_in(outputs)))


@register_cost("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _nll_loss_backward(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    # A whole matrix of zeros with one number per row.
    return Cost({}, _total_bytes((args[0], args[2])), tensor_bytes(outputs), num_kernels=2)


@register_cost("aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_")
def _fused_optimizer(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    # params, grads, first moments, second moments, max of those, steps; gradients are only read.
    lists = [list(tensors_in(value)) for value in args[:6] if isinstance(value, list | tuple)]
    params = lists[0]
    read = _total_bytes(t for tensors in lists for t in tensors)
    chunks = sum(ceil(t.numel() / _CHUNK_ELEMENTS) for t in params)
    launches = max(ceil(len(params) / _TENSORS_PER_LAUNCH), ceil(chunks / _BLOCKS_PER_LAUNCH))
    return Cost(
        flops={"fp32": 15 * sum(t.numel() for t in params)},
        bytes_read=read,
        bytes_written=read - _total_bytes(lists[1]),
        num_kernels=launches,
    )


@register_cost(
    "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
    "aten::new_empty_strided", "aten::resize_", "aten::set_", "aten::lift_fresh",
    "aten::_fused_sdp_choice",
)  # fmt: skip
def _no_kernel(args: Args, kwargs: Kwargs, outputs: Any) -> Cost:
    return Cost(num_kernels=0)
