"""AdamW in plain PyTorch: the values that the kernel is held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nearlight.core.blockwise import pack, unpack
from nearlight.ops.adamw.registration import order_of

Tensors = Sequence[torch.Tensor]


def reference(
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
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Take one AdamW step as torch's does, on copies in fp32; arguments as in `adamw`."""
    found: tuple[list[torch.Tensor], ...] = ([], [], [])
    for index, (p, g, *moments, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        with torch.no_grad():
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            signs = (True, False)
            is_narrow = moments[0].dtype == torch.uint8
            m, v = (
                _in_order(unpack(x.contiguous(), p.numel(), sign), p) if is_narrow else x.to(wide)
                for x, sign in zip(moments, signs, strict=True)
            )
            g = g.to(wide) if grad_scale is None else g.to(wide) / grad_scale.to(wide)
            g = -g if maximize else g
            m = torch.lerp(m, g, 1 - betas[0])
            v = v * betas[1] + (1 - betas[1]) * g * g
            t, rate = step.double(), lr
            corrections = [1 - beta**t for beta in betas]
            denominator = v.sqrt() / corrections[1].sqrt().to(wide) + eps
            new = p.to(wide) * (1 - rate * weight_decay)
            new = new - (rate / corrections[0]).to(wide) * (m / denominator)
            is_rounded = seed is not None and p.dtype == torch.bfloat16
            new = _rounded(new, seed or 0, index, step, p) if is_rounded else new.to(p.dtype)
            packed = [
                pack(_in_memory_of(p, x), sign) if is_narrow else x
                for x, sign in zip((m, v), signs, strict=True)
            ]
            results = (new, *packed)
            if found_inf is not None:
                old = (p, *moments)
                results = tuple(
                    torch.where(found_inf == 1, x, y) for x, y in zip(old, results, strict=True)
                )
            for place, given, result in zip(found, (p, *moments), results, strict=True):
                place.append(given.copy_(result) if in_place else result)
    return found[0], found[1], found[2]


def _dims_in_memory(param: torch.Tensor) -> list[int]:
    return sorted(range(param.ndim), key=order_of(param).__getitem__, reverse=True)


def _in_memory_of(param: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of `x` in the order in which those of the parameter lie in memory."""
    return x.permute(_dims_in_memory(param)).reshape(-1)


def _in_order(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `_in_memory_of`."""
    dims = _dims_in_memory(param)
    shaped = flat.view([param.shape[dim] for dim in dims])
    return shaped.permute([dims.index(dim) for dim in range(param.ndim)])


def _rounded(
    x: torch.Tensor, seed: int, index: int, step: torch.Tensor, param: torch.Tensor
) -> torch.Tensor:
    """Round fp32 to bf16, up with the probability of the 16 bits cut off."""
    at = _in_order(torch.arange(x.numel(), device=x.device), param)
    counter = [at & 0xFFFFFFFF, at >> 32, torch.full_like(at, index), step.long().expand_as(at)]
    random = _philox(seed, counter) & 0xFFFF
    bits = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = torch.where(is_finite, bits + random, bits) & 0xFFFF0000
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return signed.view(torch.float32).to(torch.bfloat16)


def _philox(seed: int, counter: list[torch.Tensor], rounds: int = 7) -> torch.Tensor:
    """Return the first word of Philox 4x32 (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of a product of words, in halves that fit in int64."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    total = high + (low >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)
