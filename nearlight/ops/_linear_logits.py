"""What ops over a linear layer's logits share: their checks, the loop over chunks, its cost.

Per chunk cuBLAS computes the logits into one buffer, a kernel of the op turns them into whatever it
is after and, where asked, into their own gradient in place, and two more products give the chunk's
share of the gradients of x and the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nearlight.core.cost import Cost, matmul_pipe
from nearlight.core.rows import FLOATS, accumulator
from nearlight.ops._chunks import Plan, row_pitch
from nearlight.ops._logits import split_add_

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

Needs = tuple[bool, bool, bool]

# Takes the logits of a chunk and its rows; leaves their gradient there where one is needed.
Turn = Callable[[torch.Tensor, slice], None]

# What is kept per row beside the outputs (losses, their copy, checks of labels, weights): at most.
VECTOR_BYTES_PER_ROW = 64


def autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast as autocast casts the inputs of torch.nn.functional.linear: all but fp64."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)


def check_tensors(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    per_class: Mapping[str, torch.Tensor | None] | None = None,
    per_row: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Raise unless x is (..., H), the weight (V, H), and all others fit them."""
    vocab = weight.shape[:1]
    wanted = {
        "weight": (weight, (*vocab, x.shape[-1]) if x.ndim else ()),
        "labels": (labels, x.shape[:-1]),
        "bias": (bias, vocab),
        **{name: (tensor, vocab) for name, tensor in (per_class or {}).items()},
        **{name: (tensor, x.shape[:-1]) for name, tensor in (per_row or {}).items()},
    }
    if x.ndim == 0 or weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and weight {tuple(weight.shape)}: allowed "
            "are (..., H) and (V, H) with V ≥ 1 and H ≥ 1"
        )
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: x is {x.dtype}: allowed are {FLOATS}")
    if labels.dtype != torch.int64:
        raise TypeError(f"{op}: labels are {labels.dtype}: use labels.long()")
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if hasattr(tensor, "to_local") or hasattr(x, "to_local"):
            raise TypeError(
                f"{op}: x or {name} is a DTensor: pass local tensors "
                "(weight.full_tensor(), x.to_local())"
            )
        if tensor.shape != shape or tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} is {tuple(tensor.shape)} on {tensor.device}: for x "
                f"{tuple(x.shape)} and weight {tuple(weight.shape)} on {x.device} it must be "
                f"{tuple(shape)} there"
            )
        if name in ("weight", "bias") and tensor.dtype != x.dtype:
            raise TypeError(
                f"{op}: x is {x.dtype} and {name} {tensor.dtype}: convert one, "
                "or use torch.autocast"
            )


def check_options(softcap: float | None, memory_budget_bytes: int | None) -> None:
    """Raise for a cap or a budget that is not above 0."""
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap={softcap}: allowed are numbers above 0, or None for none")
    if memory_budget_bytes is not None and memory_budget_bytes <= 0:
        raise ValueError(f"memory_budget_bytes={memory_budget_bytes}: allowed is 1 and more")


def check_labels(op: str, labels: torch.Tensor, vocab: int, ignore_index: int) -> None:
    """Raise for a label outside [0, vocab) that is not ignored; on CUDA when the device gets there.

    Raises:
        ValueError: on a CPU.
        RuntimeError: on CUDA, from the next call that waits for the device.
    """
    is_allowed = ((labels >= 0) & (labels < vocab)) | (labels == ignore_index)
    message = f"a label is neither in [0, {vocab}) nor ignore_index={ignore_index}"
    if labels.is_cpu:
        if not bool(is_allowed.all()):
            raise ValueError(f"{message}: {int(labels[~is_allowed][0])}")
    else:  # no wait for the device
        torch._assert_async(is_allowed.all(), f"{op}: {message}")


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return (..., N) as a matrix that cuBLAS takes as it lies: a copy here, not one per chunk."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if 1 in tensor.stride() and 0 not in tensor.stride() else tensor.contiguous()


def over_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needs: Needs,
    steps: Plan,
    turn: Turn,
) -> Gradients:
    """Give each chunk's logits to `turn` and multiply what it leaves there into the gradients.

    Args:
        x: (M, H), a matrix (`as_matrix`).
        weight: (V, H), likewise.
        bias: (V,) or None.
        needs: which gradients are asked for: x, weight, bias.
        steps: of `plan`.
        turn: `(logits, rows) -> None`; every row of the logits, the last one too, is followed by
            memory of no meaning up to the next multiple of 16 columns.

    Returns:
        The gradients; an empty tensor for one not needed.
    """
    rows, vocab = x.shape[0], weight.shape[0]
    needs_x, needs_weight, needs_bias = needs
    grad_x = x.new_empty(x.shape if needs_x else 0)
    grad_weight = x.new_empty(weight.shape if needs_weight else 0)
    bias_sum = torch.zeros(vocab if needs_bias else 0, dtype=accumulator(x.dtype), device=x.device)
    if rows == 0:
        return grad_x, grad_weight.zero_(), bias_sum.to(x.dtype)
    weight_sum = WeightSum(grad_weight, steps) if needs_weight else None
    buffer = x.new_empty(steps.rows, row_pitch(vocab))
    if vocab % 16:  # the kernels read whole vectors, and use nothing beyond the vocabulary
        buffer[:, vocab : -(-vocab // 16) * 16] = 0
    for start in range(0, rows, steps.rows):
        chunk = slice(start, min(start + steps.rows, rows))
        logits = buffer[: chunk.stop - start, :vocab]
        if bias is None:
            torch.mm(x[chunk], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[chunk], weight.t(), out=logits)
        turn(logits, chunk)
        # From here on the buffer holds the gradient of the logits.
        if needs_x:
            torch.mm(logits, weight, out=grad_x[chunk])
        if weight_sum is not None:
            weight_sum.add(logits, x[chunk])
        if needs_bias:
            bias_sum += logits.sum(0, dtype=bias_sum.dtype)
    return grad_x, grad_weight, bias_sum.to(x.dtype)


class WeightSum:
    """The weight gradient as it is summed over the chunks, the way the plan says."""

    def __init__(self, total: torch.Tensor, steps: Plan) -> None:
        self.total = total
        self.num_chunks = steps.num_chunks
        self.columns = steps.product_columns
        self.added = 0
        if self.columns:
            self.lower = torch.empty_like(total, dtype=torch.uint8)
            self.product = total.new_empty(self.columns, total.shape[1], dtype=torch.float32)

    def add(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add gradientᵀ @ x of one chunk."""
        self.added += 1
        if not self.columns:
            if self.added == 1:
                torch.mm(gradient.t(), x, out=self.total)
            else:
                self.total.addmm_(gradient.t(), x)
            return
        for start in range(0, self.total.shape[0], self.columns):
            part = slice(start, start + self.columns)
            columns = gradient[:, part].t()
            product = self.product[: columns.shape[0]]
            if x.is_cpu:  # has no product of bf16 that stays in fp32
                torch.mm(columns.float(), x.float(), out=product)
            else:
                torch.mm(columns, x, out_dtype=torch.float32, out=product)
            split_add_(
                self.total[part],
                self.lower[part],
                product,
                is_first=self.added == 1,
                is_last=self.added == self.num_chunks,
            )


def empty_gradients(x: torch.Tensor, weight: torch.Tensor, needs: Needs) -> Gradients:
    """Return what `over_chunks` returns, without values; grad_x has the shape of x."""
    shapes = (x.shape, weight.shape, weight.shape[:1])
    grad_x, grad_weight, grad_bias = (
        x.new_empty(shape if is_needed else (0,))
        for shape, is_needed in zip(shapes, needs, strict=True)
    )
    return grad_x, grad_weight, grad_bias


def chunks_cost(
    rows: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    needs: Needs,
    steps: Plan,
    kernels_per_chunk: int,
    small_kernels: int,
) -> Cost:
    """Return the cost of one pass over the chunks: logits once, and what `needs` asks for.

    Args:
        rows: of the call.
        vocab: columns of the logits.
        hidden: width of x.
        dtype: of x, the weight and the logits.
        needs: which gradients are asked for.
        steps: of `plan`.
        kernels_per_chunk: launches beside the products of the gradients and the sum of the bias.
        small_kernels: launches per call on vectors.
    """
    products = 1 + needs[0] + needs[1]
    kernels = kernels_per_chunk + needs[0] + needs[1] + 2 * needs[2]
    if steps.product_columns:
        kernels += 2 * -(-vocab // steps.product_columns) - 1
    return Cost(
        flops={matmul_pipe(dtype): 2 * rows * vocab * hidden * products},
        bytes_read=(rows + vocab) * hidden * dtype.itemsize + rows * 8,
        bytes_written=(needs[0] * rows + needs[1] * vocab) * hidden * dtype.itemsize
        + needs[2] * vocab * dtype.itemsize,
        num_kernels=small_kernels + steps.num_chunks * kernels,
        workspace_bytes=steps.workspace_bytes + rows * VECTOR_BYTES_PER_ROW,
        pattern="matmul",
    )
