"""Where do two models part? Layer by layer, by the one tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nearlight.core.float64 import KeepFloat64, float64_copy
from nearlight.core.numerics import Judgement, judge
from nearlight.nn.patch import unpatch

Batch = Mapping[str, Any]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One tensor of both models.

    Attributes:
        module: qualified name of the module or parameter; "" is the model itself.
        quantity: "output", "output gradient" or "gradient" (of a parameter).
        passed: whether b is as near to the truth as one batch can tell: the whole tensor keeps the
            tolerance rule, measured by a's own error, and no row is so far beyond it that luck is
            excluded.
        judgement: the errors, None where shapes differ.
        reason: what breaks the rule, also where `passed` because only rows do (see `is_doubtful`).
    """

    module: str
    quantity: str
    passed: bool
    judgement: Judgement | None
    reason: str = ""

    @property
    def is_doubtful(self) -> bool:
        """Whether single rows break the rule by no more than luck may in one batch."""
        return self.passed and bool(self.reason)


@dataclass(frozen=True)
class Comparison:
    """What `compare_models` found.

    Attributes:
        rows: outputs in the order of the forward, then gradients in the order of the backward.
        not_compared: what only one model has, with the reason.
    """

    rows: tuple[Row, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def first(self) -> Row | None:
        """The first row that differs, in the order of computation; None if none does."""
        return next((row for row in self.rows if not row.passed), None)

    @property
    def doubtful(self) -> tuple[Row, ...]:
        """Rows that only another batch can settle."""
        return tuple(row for row in self.rows if row.is_doubtful)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs; `doubtful` may hold rows."""
        return bool(self.rows) and self.first is None

    def __str__(self) -> str:
        if not self.rows:
            return "nothing could be compared"
        if self.first is None:
            doubt = f", {len(self.doubtful)} of them doubtful in single rows: compare another batch"
            words = f"the models agree in {len(self.rows)} tensors"
            return words + (doubt if self.doubtful else "")
        failed = sum(not row.passed for row in self.rows)
        return (
            f"{self.first.module or 'the model'}: {self.first.quantity} differs first "
            f"({self.first.reason}); {failed} of {len(self.rows)} tensors differ"
        )


def compare_models(
    a: nn.Module, b: nn.Module, batch: Batch, loss: Loss | None = None, seed: int = 0
) -> Comparison:
    """Run two models on one batch and name the first module whose result differs.

    Every module's output, its gradient and every parameter's gradient of `b` is judged by the
    tolerance rule: its error may be twice that of `a` plus two units in the last place. One batch
    cannot be drawn again, so the error of the whole tensor decides; what breaks the rule only in
    single rows, within luck, is listed as doubtful. The truth is a copy of `a` in fp64 that keeps
    fp64 where the model would cast to fp32. Nothing stays on the models: no gradient, no hook.
    Three models' activations are held at once.

    Args:
        a: the plain model.
        b: the changed model, its modules named like a's (a patched copy, a rewrite).
        batch: keyword arguments of both models; floating tensors are cast for the truth.
        loss: `(model, batch) -> scalar` to differentiate; None takes `model(**batch).loss`, and
            compares outputs only where there is none.
        seed: of the random generators, set before each run (dropout); restored afterwards.

    Returns:
        The rows and what could not be compared.

    Example:
        >>> import copy
        >>> a = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> b = copy.deepcopy(a)
        >>> b[0].bias.data += 0.1
        >>> run = lambda model, batch: model(batch["x"]).sum()
        >>> compare_models(a, b, {"x": torch.ones(2, 4)}, run).first.module
        '0'
    """
    truth = float64_copy(a)
    unpatch(truth)
    plain, ours = (_run(model, batch, loss, seed) for model in (a, b))
    exact = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    true = _run(truth, exact, loss, seed, keep_float64=True)
    rows, not_compared = [], []
    for key in plain:
        module, quantity = key
        if key not in ours:
            not_compared.append(f"{module} {quantity}: only a has it")
        elif key not in true or true[key].shape != plain[key].shape:
            not_compared.append(f"{module} {quantity}: computed another way in fp64")
        elif ours[key].numel() == 0 and plain[key].numel():
            not_compared.append(f"{module} {quantity}: empty in b (fused away)")
        else:
            rows.append(_judge(module, quantity, ours[key], plain[key], true[key]))
    not_compared += [f"{m} {q}: only b has it" for m, q in ours if (m, q) not in plain]
    return Comparison(tuple(rows), tuple(not_compared))


def _judge(
    module: str, quantity: str, ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor
) -> Row:
    if ours.shape != plain.shape:
        reason = f"shape {tuple(ours.shape)} against {tuple(plain.shape)}"
        return Row(module, quantity, False, None, reason)
    judgement = judge(ours, plain, truth)
    passed = judgement.may_be_luck and judgement.shares.whole <= 1
    return Row(module, quantity, passed, judgement, judgement.reason)


def _run(
    model: nn.Module, batch: Batch, loss: Loss | None, seed: int, keep_float64: bool = False
) -> dict[tuple[str, str], torch.Tensor]:
    """Return outputs in forward order, then gradients in backward order."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Only the first call of a module: checkpointing calls it again in the backward.
            leaves = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
            for index, leaf in enumerate(leaves):
                suffix = f"[{index}]" if len(leaves) > 1 else ""
                if leaf.is_floating_point():
                    outputs.setdefault(name + suffix, leaf)

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules()]
    mode = KeepFloat64() if keep_float64 else nullcontext()
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices), mode, torch.enable_grad():
            torch.manual_seed(seed)
            if loss is None:
                result = getattr(model(**batch), "loss", None)
            else:
                result = loss(model, batch)
            gradients = {} if result is None else _gradients(model, outputs, result)
    finally:
        for handle in handles:
            handle.remove()
    found = {(name, "output"): tensor.detach() for name, tensor in outputs.items()}
    return found | gradients


def _gradients(
    model: nn.Module, outputs: Mapping[str, torch.Tensor], loss: torch.Tensor
) -> dict[tuple[str, str], torch.Tensor]:
    named = {(name, "output gradient"): t for name, t in outputs.items() if t.requires_grad}
    order = {name: index for index, name in enumerate(outputs)}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # A parameter's gradient appears right after that of its module's output.
    for name, parameter in parameters:
        named[name, "gradient"] = parameter
    values = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {key: value for key, value in zip(named, values, strict=True) if value is not None}

    def position(key: tuple[str, str]) -> tuple[int, bool]:
        name, quantity = key
        if quantity == "gradient":
            name = name.rpartition(".")[0]
        return -order.get(name, -1), quantity == "gradient"

    return {key: found[key] for key in sorted(found, key=position)}
