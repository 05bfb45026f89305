"""What the records of ops over a linear layer's logits share: inputs, sizes, names of cases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from nearlight.core.op import Case, Inputs, normal
from nearlight.ops._linear_logits import Needs


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of every kind: flat, confident (p ≈ 0.999), tiny, large and far from 0; some ignored."""
    rows, hidden, vocab = (case.shape[name] for name in ("BT", "H", "V"))
    random = partial(normal, case, device, generator)
    weight = random(vocab, hidden) / max(hidden, 1) ** 0.5
    labels = torch.randint(vocab, (rows,), device=device, generator=generator)
    x = random(rows, hidden)
    kind = torch.arange(rows, device=device) % 5
    # Along its own class's weight a row becomes sure of it.
    x += 12.0 * (kind == 1)[:, None] * weight[labels]
    x *= torch.tensor([1.0, 1.0, 1e-3, 30.0, 1.0], device=device)[kind][:, None]
    x += 3.0 * (kind == 4)[:, None]
    labels[kind == 2] = case.options.get("ignore_index", -100)
    inputs: Inputs = {
        "x": x.to(case.dtype).requires_grad_(),
        "weight": weight.to(case.dtype).requires_grad_(),
        "labels": labels,
    }
    if case.shape.get("bias"):
        inputs["bias"] = random(vocab).to(case.dtype).requires_grad_()
    if case.shape.get("class_weight"):
        inputs["class_weight"] = random(vocab).abs() + 0.1
    if case.shape.get("token_weight"):
        inputs["token_weight"] = random(rows)
    return {**inputs, **case.options}


def sizes(case: Case) -> tuple[int, int, int]:
    """Return rows, vocabulary and hidden width of a case."""
    return case.shape["BT"], case.shape["V"], case.shape["H"]


def gradients_of(case: Case) -> Needs:
    """Return the gradients of a case: x, weight, bias."""
    return True, True, bool(case.shape.get("bias"))


def case_of(
    rows: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    parts: Sequence[str] = (),
    **options: object,
) -> Case:
    """Make a case; `parts` names the optional tensors it has."""
    words = [*parts, *(f"{name}={value}" for name, value in options.items())]
    name = " ".join([f"BT{rows} H{hidden} V{vocab}", *words])
    return Case(
        name, {"BT": rows, "H": hidden, "V": vocab, **dict.fromkeys(parts, 1)}, dtype, options
    )


def refuse_turing(op: str, arch: str) -> None:
    """Raise ValueError for sm_75."""
    if arch == "sm_75":
        raise ValueError(
            f"{op} is matrix products around a kernel on their logits, in bf16, which sm_75 "
            "does not have: take sm_80 or later"
        )
