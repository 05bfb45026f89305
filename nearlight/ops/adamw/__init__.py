"""AdamW: one step of Adam with decoupled weight decay, for all tensors of a list at once.

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    p = (1 − lr λ) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv:1711.05101).
Limits: computed in fp32 (fp64 for fp64 parameters); eight-bit states as in
`nearlight.core.blockwise`; a tensor with gaps, and a gradient or state that lies otherwise in
memory than its parameter, is copied; gradients are never written into (torch's fused step
unscales them in place).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.blockwise import state_bytes
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import refuse_dtensor
from nearlight.ops.adamw.kernels import Config, config
from nearlight.ops.adamw.reference import reference
from nearlight.ops.adamw.registration import (
    PAIRS,
    in_place_op,
    out_of_place_op,
    step_cost,
    step_out_of_place,
)

__all__ = ["OP", "Config", "adamw", "config", "reference"]

Tensors = Sequence[torch.Tensor]

_USUAL_DTYPES = {
    (param, grad, *[torch.float64 if param == torch.float64 else torch.float32] * 2, torch.float32)
    for param, grad in PAIRS
}


def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    seed: int | None = None,
    in_place: bool = True,
    backend: str = "auto",
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Take one AdamW step, in one launch over any number of tensors of any size.

    p = (1 − lr λ) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε), after m and v took in g.

    Args:
        params: fp32, bf16, fp16 or fp64, also mixed, any strides, on one device, CPU or CUDA.
        grads: shapes of `params`, in their dtype or fp32.
        exp_avgs: first moments, shapes of `params`, fp32 (fp64 for fp64); or uint8 of
            `nearlight.core.blockwise.state_bytes(numel)` for fp32 and narrower parameters, in
            which case the second moment is uint8, too.
        exp_avg_sqs: second moments, likewise.
        steps: one fp32 number each on their device: t, which is 1 in the first step.
        lr: learning rate; a tensor of one number on the device is read there.
        betas: β₁ and β₂ within [0, 1).
        eps: ε.
        weight_decay: λ.
        maximize: follow the gradients upwards.
        grad_scale: one fp32 number that the gradients are divided by.
        found_inf: one fp32 number; where it is 1 nothing changes, without a synchronisation.
        seed: bf16 parameters are rounded stochastically, by this seed, the tensor's place in the
            list, the element's place in memory and t; None rounds to nearest.
        in_place: write over `params` and both moments; False returns new ones.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        Parameters, first and second moments; the given tensors where `in_place`.

    Raises:
        ValueError: lists, shapes, devices or numbers that do not fit, or overlapping memory.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.

    Example:
        >>> import torch
        >>> from nearlight.ops import adamw
        >>> p, g, m, v = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
        >>> _ = adamw([p], [g], [m], [v], [torch.tensor(1.0)], lr=0.5, weight_decay=0.0)
        >>> p
        tensor([0.5000, 0.5000])
    """
    _check(params, grads, exp_avgs, exp_avg_sqs, steps, betas, in_place)
    numbers = (lr, grad_scale, found_inf)
    refuse_dtensor("adamw", *(x for x in numbers if isinstance(x, torch.Tensor)))
    if not params or not use_triton(backend, params[0]):
        return reference(
            params, grads, exp_avgs, exp_avg_sqs, steps, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, maximize=maximize, grad_scale=grad_scale,
            found_inf=found_inf, seed=seed, in_place=in_place,
        )  # fmt: skip
    lr_tensor = lr if isinstance(lr, torch.Tensor) else None
    lists = [list(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs, steps)]
    rate = 0.0 if isinstance(lr, torch.Tensor) else float(lr)
    rest = (lr_tensor, grad_scale, found_inf, rate, *betas, eps, weight_decay, maximize, seed)
    if in_place:
        with torch.no_grad():
            in_place_op(*lists, *rest)
        return lists[0], lists[2], lists[3]
    new: tuple[list[torch.Tensor], ...] = out_of_place_op(*lists, *rest)
    return new[0], new[1], new[2]


def _check(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    betas: tuple[float, float],
    in_place: bool,
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs, steps)
    if len({len(tensors) for tensors in lists}) != 1:
        counts = ", ".join(str(len(tensors)) for tensors in lists)
        raise ValueError(
            f"adamw: lists of {counts} tensors; params, grads, exp_avgs, exp_avg_sqs and steps "
            "must be equally long"
        )
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas={betas}; allowed are two numbers within [0, 1)")
    # What is told per tensor below is found here at a tenth of the host cost.
    dtypes = {
        (p.dtype, g.dtype, m.dtype, v.dtype, t.dtype) for p, g, m, v, t in zip(*lists, strict=True)
    }
    together = [tensor for tensors in lists for tensor in tensors]
    is_usual = (
        dtypes <= _USUAL_DTYPES
        and {type(tensor) for tensor in together} <= {torch.Tensor, torch.nn.Parameter}
        and len({tensor.device for tensor in together}) == 1
        and all(
            p.shape == g.shape == m.shape == v.shape for p, g, m, v, _ in zip(*lists, strict=True)
        )
        and all(x.is_contiguous() for tensors in lists[:4] for x in tensors)
        and all(step.numel() == 1 for step in steps)
    )
    if not is_usual:
        _check_each(lists, in_place)


def _check_each(lists: Sequence[Tensors], in_place: bool) -> None:
    params = lists[0]
    for index, (p, g, m, v, step) in enumerate(zip(*lists, strict=True)):
        refuse_dtensor("adamw", p, g, m, v, step)
        if (p.dtype, g.dtype) not in PAIRS:
            raise TypeError(
                f"adamw: params[{index}] is {p.dtype} and its gradient {g.dtype}; allowed are "
                "fp32, bf16, fp16 and fp64 with a gradient of the same dtype, or of fp32"
            )
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        is_narrow = m.dtype == torch.uint8 and wide == torch.float32
        if m.dtype != v.dtype or (m.dtype != wide and not is_narrow) or step.dtype != torch.float32:
            raise TypeError(
                f"adamw: exp_avgs[{index}] is {m.dtype}, exp_avg_sqs[{index}] {v.dtype} and "
                f"steps[{index}] {step.dtype}; for {p.dtype} parameters allowed are {wide} (or "
                "uint8 for both moments of fp32 and narrower ones) and an fp32 step"
            )
        shape = (state_bytes(p.numel()),) if is_narrow else p.shape
        devices = {tensor.device for tensor in (params[0], p, g, m, v, step)}
        if g.shape != p.shape or m.shape != shape or v.shape != shape or len(devices) > 1:
            raise ValueError(
                f"adamw: params[{index}] {tuple(p.shape)} needs a gradient of this shape and "
                f"moments of shape {tuple(shape)}, all on {params[0].device}; got "
                f"{tuple(g.shape)}, {tuple(m.shape)}, {tuple(v.shape)} on "
                f"{', '.join(sorted(map(str, devices)))}"
            )
        if step.numel() != 1:
            raise ValueError(f"adamw: steps[{index}] has {step.numel()} numbers; allowed is one")
        if in_place and p.numel() > 1:
            for name, tensor in (("params", p), ("exp_avgs", m), ("exp_avg_sqs", v)):
                if any(
                    n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)
                ):
                    raise ValueError(
                        f"adamw: {name}[{index}] is expanded and cannot be written in place; pass "
                        "a copy, or in_place=False"
                    )


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Tensors of one shape, with gradients of three sizes and steps far apart."""
    shape = (case.shape["rows"], case.shape["N"])
    if not case.shape["tensors"]:
        raise ValueError("an optimizer without tensors has nothing to compute")
    lists: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")
    }
    for index in range(case.shape["tensors"]):

        def random(scale: float) -> torch.Tensor:
            return scale * normal(case, device, generator, *shape)

        lists["params"].append(random(1.0).to(case.dtype))
        lists["grads"].append(random(10.0 ** (index % 3 - 1)).to(case.dtype))
        lists["exp_avgs"].append(random(0.1))
        lists["exp_avg_sqs"].append(random(0.1).square())
        lists["steps"].append(torch.tensor(float(1 + 7 * index), device=device))
    return {**lists, **case.options}


def _cost(case: Case) -> Mapping[str, Cost]:
    shape = (case.shape["rows"], case.shape["N"])
    param = torch.empty(shape, dtype=case.dtype, device="meta")
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    lists = [[x] * case.shape["tensors"] for x in (param, param, param.to(wide), param.to(wide))]
    cost = step_cost(lists, {}, None)
    return {"forward": cost, "forward_backward": cost}


def _extra_bytes(case: Case) -> int:
    # The table: its rows and a number for each chunk, in blocks of the allocator.
    numel = case.shape["rows"] * case.shape["N"]
    return 1024 + case.shape["tensors"] * (88 + 4 * (numel // 1024 + 1))


def _torch_peer() -> Callable[..., Any]:
    def run(
        params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, steps: Any, **options: Any
    ) -> Any:
        torch._fused_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=options.get("lr", 1e-3),
            beta1=0.9, beta2=0.999, weight_decay=options.get("weight_decay", 1e-2), eps=1e-8,
            amsgrad=False, maximize=options.get("maximize", False),
        )  # fmt: skip
        return params, exp_avgs, exp_avg_sqs

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds:
        for dtype, is_narrow, seed in (
            (torch.float32, False, None), (half, False, None if arch == "sm_75" else 1),
            (torch.float32, True, None),
        ):  # fmt: skip
            p = torch.empty(4096, 4096, dtype=dtype, device="meta")
            state = torch.empty_like(p, dtype=torch.float32)
            if is_narrow:
                state = torch.empty(state_bytes(p.numel()), dtype=torch.uint8, device="meta")
            step = torch.empty((), device="meta")
            hyper = (1e-3, 0.9, 0.999, 1e-8, 1e-2)
            step_out_of_place(
                [p], [p], [state], [state], [step], None, None, None, *hyper, False, seed
            )
    return [replace(build, max_registers=128) for build in builds]


def _case(
    tensors: int, rows: int, width: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Case:
    name = f"{tensors} x {rows}x{width}" + "".join(f" {name}" for name in options)
    shape = {"rows": rows, "tensors": tensors, "N": width}
    return Case(name, shape, dtype, {"in_place": False, **options})


def _infinite(inputs: Inputs) -> Inputs:
    grad = inputs["grads"][0].clone()
    grad[0], grad[1, 0] = torch.inf, torch.nan
    return {**inputs, "grads": [grad, *inputs["grads"][1:]]}


def _skipped(inputs: Inputs) -> Inputs:
    return {**_infinite(inputs), "found_inf": torch.ones_like(inputs["steps"][0])}


OP = Op(
    name="adamw",
    function=adamw,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        # The benchmark holds twelve copies of the inputs: 32 such tensors would not fit.
        _case(8, 4096, 4096),
        _case(8, 4096, 4096, torch.bfloat16),
        _case(8, 2880, 7168),
        _case(2000, 64, 576),
    ],
    check_cases=[
        _case(2, 5, 7),
        _case(2, 3, 129, torch.bfloat16),
        _case(2, 3, 65, torch.float16, maximize=True, weight_decay=0.5),
        _case(2, 3, 65, torch.float64),
        _case(1, 257, 259),
    ],
    large_cases=[_case(1, 600_000, 4096, torch.bfloat16)],
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": _torch_peer},
    builds=_builds,
    extremes=[
        Extreme("infinite gradients", _case(2, 3, 64), _infinite, is_finite=False),
        Extreme("a skipped step", _case(2, 3, 64), _skipped),
    ],
)
