"""The Op record of cross entropy: cases, costs, peers, budgets and extremes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import accumulator
from nearlight.ops.cross_entropy import launchers
from nearlight.ops.cross_entropy.function import STATS, cross_entropy, reference
from nearlight.ops.cross_entropy.launchers import Arguments
from nearlight.ops.cross_entropy.registration import cost_fwd, extra_bytes


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of every kind: flat, confident (p ≈ 0.999), tiny, large and far from 0; some ignored."""
    rows, vocab = case.shape["M"], case.shape["V"]
    random = partial(normal, case, device, generator)
    labels = torch.randint(vocab, (rows,), device=device, generator=generator)
    logits = random(rows, vocab)
    kind = torch.arange(rows, device=device) % 5
    logits *= torch.tensor([1.0, 1.0, 1e-3, 30.0, 1.0], device=device)[kind][:, None]
    logits += 20.0 * (kind == 4)[:, None]
    logits.scatter_add_(1, labels[:, None], 12.0 * (kind == 1)[:, None].to(logits.dtype))
    # Few of many rows: a bench should read what its cost counts.
    labels[2:258:32] = case.options.get("ignore_index", -100)
    inputs: Inputs = {"logits": logits.to(case.dtype).requires_grad_(), "labels": labels}
    if case.shape.get("class_weight"):
        inputs["class_weight"] = random(vocab).abs() + 0.1
    if case.shape.get("token_weight"):
        # Of one sign: a mean over weights that cancel says nothing of how it was computed.
        inputs["token_weight"] = random(rows).abs()
    return {**inputs, **case.options}


def _arguments(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> Arguments:
    given: dict[str, Any] = {
        "class_weight": None, "token_weight": None, "num_items": None, "ignore_index": -100,
        "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0,
        "reduction": "mean", "stats": [], "has_gradient": False, "has_later_gradient": False,
    }  # fmt: skip
    return Arguments(logits, labels, **{**given, **options})


def _cost(case: Case) -> Mapping[str, Cost]:
    """One read of the logits and one write of the gradient, whenever that is computed."""
    rows, vocab = case.shape["M"], case.shape["V"]
    logits = torch.empty(rows, vocab, dtype=case.dtype, device="meta")
    labels = torch.empty(rows, dtype=torch.int64, device="meta")

    def cost(has_gradient: bool) -> Cost:
        arguments = _arguments(logits, labels, has_gradient=has_gradient)
        results = launchers.empty_results(arguments)
        scalar = results._replace(loss=results.loss.new_empty(()))
        return cost_fwd(arguments, {}, scalar)

    return {"forward": cost(False), "forward_backward": cost(True) + Cost(num_kernels=1)}


def _extra_bytes(case: Case) -> int:
    # Class weights in the accumulator's dtype.
    vocab_bytes = case.shape["V"] * accumulator(case.dtype).itemsize
    return extra_bytes(case.shape["M"]) + 2 * vocab_bytes * bool(case.shape.get("class_weight"))


def _torch_peer(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels)


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def run(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # It writes its gradient over the logits: a copy, or the next run would start from that.
        loss: torch.Tensor = liger_cross_entropy(logits.clone(), labels)
        return loss

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        labels = torch.empty(8192, dtype=torch.int64)
        one, statistics = torch.empty(()), torch.empty(2, 8192)
        for vocab in (32_000, 50_257, 128_256):
            logits = torch.empty(8192, vocab, dtype=dtype)
            launchers.forward(_arguments(logits, labels, has_gradient=True))
        launchers.forward(_arguments(logits, labels))
        launchers.backward(one, statistics, one, *_arguments(logits, labels))
        bent = {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4}
        weighted = {"label_smoothing": 0.1, "class_weight": torch.empty(vocab)}
        for options in ({"label_smoothing": 0.1}, bent, weighted, {"stats": list(STATS)}):
            launchers.forward(_arguments(logits, labels, has_gradient=True, **options))
        launchers.scale(logits, logits, one)
    # What lets a program of 16 warps run.
    return [
        replace(build, max_registers=min(200, 65536 // (32 * build.num_warps))) for build in builds
    ]


def _case(
    rows: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    parts: Sequence[str] = (),
    **options: object,
) -> Case:
    """Make a case; `parts` names the optional tensors it has."""
    words = [f"{rows}x{vocab}", *parts, *(f"{name}={value}" for name, value in options.items())]
    return Case(" ".join(words), {"M": rows, "V": vocab, **dict.fromkeys(parts, 1)}, dtype, options)


_OPTIONS: tuple[dict[str, object], ...] = (
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"logit_scale": -0.25},
    {"reduction": "sum", "num_items": 7},
    {"reduction": "none", "softcap": 3.0, "z_loss": 1e-3},
    {"ignore_index": 3},
    {"stats": STATS},
    # What each adds to the gradient must not replace what the others did.
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.25},
)
_EXTREME = _case(5, 300, torch.float32, stats=("logsumexp", "entropy"))


def _ignore_all(inputs: Inputs) -> Inputs:
    return {**inputs, "labels": torch.full_like(inputs["labels"], -100)}


def _nan_where_ignored(inputs: Inputs) -> Inputs:
    logits = inputs["logits"].detach().clone()
    logits[inputs["labels"] == -100] = torch.nan
    return {**inputs, "logits": logits.requires_grad_()}


def _finite_at_the_label(inputs: Inputs) -> Inputs:
    logits = torch.full_like(inputs["logits"], -torch.inf)
    columns = inputs["labels"].clamp_min(0)[:, None]
    return {**inputs, "logits": logits.scatter(1, columns, 2.0).detach().requires_grad_()}


def _label_outside(inputs: Inputs) -> Inputs:
    return {**inputs, "labels": torch.full_like(inputs["labels"], inputs["logits"].shape[1])}


OP = Op(
    name="cross_entropy",
    function=cross_entropy,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        *(_case(8192, vocab) for vocab in (32_000, 50_257, 128_256, 151_936)),
        # With as many rows the inputs, copies and intermediates of all peers would fill a GPU.
        _case(4096, 262_144),
    ],
    check_cases=[
        *(
            _case(rows, vocab, dtype)
            for rows, vocab in ((1, 1), (2, 127), (3, 129), (129, 65))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        _case(7, 33, torch.float64, z_loss=1e-2),
        *(_case(23, 53, torch.float32, **options) for options in _OPTIONS),  # type: ignore[arg-type]  # mixed options
        *(
            _case(23, 53, dtype, ("class_weight", "token_weight"), label_smoothing=0.2)
            for dtype in (torch.float16, torch.bfloat16)
        ),
        _case(2, 131_073, torch.bfloat16),
    ],
    large_cases=[_case(20_000, 128_256, reduction="none")],
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": lambda: _torch_peer, "liger": _liger_peer},
    builds=_builds,
    extremes=[
        Extreme("all rows ignored", _EXTREME, _ignore_all),
        Extreme("NaN in ignored rows", _EXTREME, _nan_where_ignored),
        Extreme("one finite logit", _case(2, 100_000, torch.float32), _finite_at_the_label),
        Extreme("label out of range", _EXTREME, _label_outside, raises=ValueError),
    ],
)
