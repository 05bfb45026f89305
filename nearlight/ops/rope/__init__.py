"""RoPE: rotary position embedding of queries and keys, both in one launch.

    out = x · cos + rotate(x) · sin over the first R entries of a head; the others are copied
    rotate(x) = (−x₂, x₁), where x = (x₁, x₂) are the two halves (half-split, as in Llama and most
    others) or the even and the odd entries (interleaved, as in GPT-J and Cohere)

Legend: B = batch, S = tokens, H = heads of q, HK = heads of k, D = width of a head, R = rotary
width, W = width of the tables (R, or R / 2 where each angle is stored once), P = rows of a table
that positions pick from.
Source: Su et al., "RoFormer", 2021 (arXiv:2104.09864), equation 34.
Limits: computed in fp32 (fp64 for fp64 inputs) and rounded once; no gradient of cos and sin. The
map is linear: the backward saves neither q nor k, and gradients of gradients are right. Positions
on several axes and contexts stretched by YaRN and others are tables to it: `rope_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops.rope.in_place import refuse_in_place, turn_in_place
from nearlight.ops.rope.kernels import Config, config
from nearlight.ops.rope.registration import Pair, cost, forward_op, launch
from nearlight.ops.rope.tables import packed_positions, rope_tables

__all__ = ["OP", "Config", "config", "packed_positions", "reference", "rope", "rope_tables"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    heads_dim: int = 1,
) -> Pair:
    """Rotate as transformers' models do; arguments as in `rope`."""
    rotary_dim = rotary_dim or cos.shape[-1]

    def spread(table: torch.Tensor) -> torch.Tensor:
        if position_ids is not None:
            table = table[position_ids]
        if table.shape[-1] < rotary_dim:
            table = table.repeat_interleave(2, -1) if interleaved else torch.cat([table] * 2, -1)
        return (table if table.ndim == 3 else table[None]).unsqueeze(heads_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    def embed(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        turned = (turned * spread(cos) + rotate(turned) * spread(sin)).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    return embed(q), embed(k)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    heads_dim: int = 1,
    in_place: bool = False,
    backend: str = "auto",
) -> Pair:
    """Rotate queries and keys by the angles of their positions, out of place unless asked for.

    out = x · cos + rotate(x) · sin, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        q: (B, H, S, D) bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        k: (B, HK, S, D), dtype and device of `q`, any strides and number of heads.
        cos: (S, W), (1, S, W) or (B, S, W), or (P, W) with `position_ids`; any floating dtype. A
            table of width R multiplies entry by entry, as in transformers; one of width R / 2
            holds each angle once. `rope_tables` makes them for packed sequences, multimodal
            sections and stretched contexts.
        sin: shape and dtype of `cos`.
        position_ids: (B, S) or (1, S) int64 or int32 rows of the tables; negative ones count from
            the end. Beyond the table: IndexError on the CPU, NaN rows on CUDA.
        interleaved: pairs are (0, 1), (2, 3), ... and not (0, R/2), (1, R/2 + 1), ...
        rotary_dim: R, even, at most D; W by default, so tables that hold each angle once need it.
        heads_dim: 1 as above; 2 for q (B, S, H, D) and k (B, S, HK, D).
        in_place: write over q and k, any strides in which no two entries share memory, and return
            them; what does not turn is not touched. The gradient costs a launch for each. With a
            gradient asked for, torch refuses parts made by `split`, `chunk` or `unbind`: take
            slices.
        backend: "auto" (Triton on CUDA, plain PyTorch on the CPU), "triton" or "reference".

    Returns:
        The rotated q and k, each in dtype and order of memory of its input; differentiable in q
        and k.

    Raises:
        TypeError: a dtype that is not allowed, or a DTensor.
        ValueError: shapes or devices that do not fit, tables that require a gradient, an unknown
            backend, or in place a leaf that requires a gradient or memory that is shared.

    Source: Su et al. 2021, arXiv 2104.09864.

    Example:
        >>> import torch
        >>> from nearlight.ops import rope
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> rope(x, x, torch.zeros(1, 2), torch.ones(1, 2))[0].flatten()
        tensor([0., 1.])
    """
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    _check(q, k, cos, sin, position_ids, rotary_dim, heads_dim)
    if in_place:
        refuse_in_place(q, k, cos, sin, position_ids)
    if not use_triton(backend, q):
        turned = reference(
            q,
            k,
            cos,
            sin,
            position_ids=position_ids,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            heads_dim=heads_dim,
        )
        return (q.copy_(turned[0]), k.copy_(turned[1])) if in_place else turned
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "rope: cos or sin requires a gradient, which the kernel does not give; detach them, or "
            "use backend='reference'"
        )
    run = turn_in_place if in_place else forward_op
    return run(q, k, cos, sin, position_ids, interleaved, rotary_dim, heads_dim)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
    heads_dim: int,
) -> None:
    refuse_dtensor("rope", q, k, cos, sin, position_ids)
    if q.dtype not in FLOATS or q.dtype != k.dtype or cos.dtype not in FLOATS:
        raise TypeError(
            f"rope: q is {q.dtype}, k {k.dtype}, cos {cos.dtype}; allowed are fp16, bf16, fp32 and "
            "fp64, the same for q and k"
        )
    if heads_dim not in (1, 2):
        raise ValueError(f"rope: heads_dim={heads_dim}, allowed are 1 (B, H, S, D), 2 (B, S, H, D)")
    s = 3 - heads_dim
    if q.ndim != 4 or k.ndim != 4 or any(q.shape[d] != k.shape[d] for d in (0, s, 3)):
        raise ValueError(
            f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} must have four dimensions that "
            f"agree in all but the heads, dimension {heads_dim}; packed tokens (T, H, D) go in as "
            "q[None] with heads_dim=2"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[3]:
        raise ValueError(
            f"rope: rotary_dim={rotary_dim} (the width of cos by default), allowed is an even "
            f"number from 2 to the head width {q.shape[3]}"
        )
    _check_tables(q.shape[0], q.shape[s], cos, sin, position_ids)
    if cos.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise ValueError(
            f"rope: cos has width {cos.shape[-1]}, allowed is rotary_dim={rotary_dim} or half of it"
        )
    others = (k, cos, sin) if position_ids is None else (k, cos, sin, position_ids)
    if any(tensor.device != q.device for tensor in others):
        raise ValueError(
            f"rope: q is on {q.device} and others on {[str(t.device) for t in others]}: move them"
        )


def _check_tables(
    batch: int,
    tokens: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> None:
    # torch.compile fixes every size that a tuple compares or a message prints: sizes are compared
    # one by one, and messages made only where they are raised.
    if position_ids is None:
        fits = cos.ndim in (2, 3) and cos.shape[-2] == tokens
        fits = fits and (cos.ndim == 2 or cos.shape[0] == 1 or cos.shape[0] == batch)
    else:
        fits = cos.ndim == 2
        if position_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"rope: position_ids is {position_ids.dtype}, allowed int64 and int32")
        is_row = position_ids.ndim == 2 and position_ids.shape[1] == tokens
        if not (is_row and (position_ids.shape[0] == 1 or position_ids.shape[0] == batch)):
            raise ValueError(
                f"rope: position_ids {tuple(position_ids.shape)}, allowed is ({batch}, {tokens}) "
                f"or (1, {tokens}); several axes of positions go into rope_tables"
            )
    is_same = cos.ndim == sin.ndim and cos.dtype == sin.dtype
    if not (fits and is_same and all(cos.shape[d] == sin.shape[d] for d in range(cos.ndim))):
        wanted = f"({tokens}, W), (1, {tokens}, W) or ({batch}, {tokens}, W)"
        raise ValueError(
            f"rope: cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} must "
            f"agree and be {wanted if position_ids is None else '(P, W) with position_ids'}"
        )


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Lay q and k out as projections do, and the tables as transformers' rotary modules do."""
    batch, tokens, width = case.shape["B"], case.shape["S"], case.shape["D"]
    options = dict(case.options)
    has_half_tables, num_axes = options.pop("has_half_tables", False), options.pop("num_axes", 0)
    rotary_dim = options.get("rotary_dim", width)
    num_rows = case.shape.get("P", tokens)

    def random_heads(count: int) -> torch.Tensor:
        x = normal(case, device, generator, batch, tokens, count, width)
        return x.to(case.dtype).transpose(1, 3 - options.get("heads_dim", 1)).requires_grad_()

    wide = torch.promote_types(case.dtype, torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=wide) / rotary_dim
    angles = torch.arange(num_rows, device=device)[:, None] * 10000.0**-exponents
    if not has_half_tables:
        is_interleaved = options.get("interleaved", False)
        angles = angles.repeat_interleave(2, 1) if is_interleaved else torch.cat([angles] * 2, 1)
    inputs = {"q": random_heads(case.shape["H"]), "k": random_heads(case.shape["HK"]), **options}
    inputs |= {"cos": angles.cos().to(case.dtype), "sin": angles.sin().to(case.dtype)}
    if "position_ids" in options:
        shape = (batch, tokens)  # negative ones too, as left padding gives them
        inputs["position_ids"] = torch.randint(
            -num_rows, num_rows, shape, generator=generator, device=device
        )
    if num_axes:  # tables of (B, S), as multimodal models have them
        sizes = (num_axes, batch, tokens)
        positions = torch.randint(0, 100, sizes, generator=generator, device=device)
        share = rotary_dim // 2 // num_axes
        sections = [rotary_dim // 2 - share * (num_axes - 1)] + [share] * (num_axes - 1)
        tables = rope_tables(
            rotary_dim, positions, parameters={"mrope_section": sections}, dtype=case.dtype
        )
        inputs |= zip(("cos", "sin"), tables, strict=True)
    return inputs


def _cost(case: Case) -> Mapping[str, Cost]:
    inputs = _make_inputs(case, torch.device("meta"), torch.Generator())
    q, k, cos, sin = (inputs[name] for name in ("q", "k", "cos", "sin"))
    one_way = cost((q, k, cos, sin, inputs.get("position_ids")), {}, (q, k))
    return {"forward": one_way, "forward_backward": one_way + one_way}


def _liger_peer() -> Callable[..., Pair]:
    from liger_kernel.ops.rope import LigerRopeFunction

    # It rotates in place where q and k lie as (B, S, H, D): they hold other values after each
    # call. No clone is made, for the memory so saved is what it is built for.
    def run(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None) -> Any:
        if position_ids is not None:  # it takes no positions: what they pick is gathered for it
            cos, sin = cos[position_ids], sin[position_ids]
        elif cos.ndim == 2:
            cos, sin = cos[None], sin[None]
        return LigerRopeFunction.apply(q, k, cos, sin)

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        for dtype in (torch.float16 if arch == "sm_75" else torch.bfloat16, torch.float32):
            q, k = (torch.empty(4, 8192, n, 128, dtype=dtype).transpose(1, 2) for n in (32, 8))
            positions = torch.empty(4, 8192, dtype=torch.int64)
            for rotary_dim, is_interleaved in ((128, False), (64, True)):
                table = torch.empty(8192, rotary_dim, dtype=dtype)
                launch(True, q, k, table, table, positions, is_interleaved, rotary_dim, 1)
    # They leave room for six programs on an SM, twelve vectors in flight a thread.
    return [replace(build, max_registers=80) for build in builds]


def _case(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, num_rows: int = 0, **options: Any
) -> Case:
    shape = dict(zip(("B", "S", "H", "HK", "D"), sizes, strict=True))
    name = "B{B} S{S} H{H}/{HK} D{D}".format(**shape)
    if num_rows:  # the positions themselves are drawn by `_make_inputs`
        shape["P"] = num_rows
        options["position_ids"] = "drawn"
    return Case(" ".join([name, *options]), shape, dtype, options)


OP = Op(
    name="rope",
    function=rope,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        _case((4, 8192, 32, 8, 128)),
        _case((4, 8192, 28, 4, 128), num_axes=3),  # Qwen2-VL 7B
        _case((1, 32768, 32, 8, 128), num_rows=32768),  # packed sequences
    ],
    check_cases=[
        *(
            _case(sizes, dtype, num_rows, **options)
            for dtype in (torch.float32, torch.bfloat16)
            for sizes, num_rows, options in (
                ((2, 5, 3, 1, 8), 0, {}),
                ((1, 1, 9, 3, 64), 0, {}),
                ((2, 33, 4, 4, 6), 0, {"has_half_tables": True, "rotary_dim": 6}),
                ((2, 4, 5, 3, 10), 0, {"interleaved": True, "rotary_dim": 6}),
                ((3, 7, 2, 1, 12), 11, {"rotary_dim": 4, "heads_dim": 2}),
            )
        ),
        _case((2, 3, 2, 2, 4), torch.float16),
        _case((2, 5, 3, 1, 12), num_axes=3),
        # No rest behind the pairs that would write over what is stored beyond them.
        _case((1, 3, 2, 1, 6), torch.float32, interleaved=True),
        _case((2, 3, 2, 1, 4), torch.float64),
        _case((1, 66_000, 1, 1, 2), torch.float32),
    ],
    cost=_cost,
    extra_bytes=lambda case: 0,
    extremes=[
        Extreme(
            "in place on leaves that require a gradient",
            _case((2, 3, 2, 1, 4), torch.float32),
            lambda inputs: {**inputs, "in_place": True},
            raises=ValueError,
        )
    ],
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=_builds,
)
