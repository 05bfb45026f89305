"""Direct preference optimization."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nearlight.training.losses.tokens import check_shapes, reduced, wide

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")


def dpo_loss(
    chosen_log_probs: torch.Tensor,
    rejected_log_probs: torch.Tensor,
    ref_chosen_log_probs: torch.Tensor | None = None,
    ref_rejected_log_probs: torch.Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reduction: str = "mean",
) -> torch.Tensor:
    """Prefer the chosen of two completions over the rejected one, by more than the reference does.

    With the margin m = log (π/π_ref)(chosen) − log (π/π_ref)(rejected) and ε = label_smoothing:

        sigmoid   −(1 − ε) log σ(β m) − ε log σ(−β m)
        robust    (−(1 − ε) log σ(β m) + ε log σ(−β m)) / (1 − 2 ε)
        hinge     max(0, 1 − β m)
        ipo       (m − 1 / (2 β))², of averaged log-probabilities

    Args:
        chosen_log_probs: (B,) floats, as `sequence_log_prob` gives them.
        rejected_log_probs: (B,).
        ref_chosen_log_probs: (B,) of the reference model; None without a reference.
        ref_rejected_log_probs: (B,) likewise, both or none.
        beta: β > 0.
        label_smoothing: ε, the probability that a label is wrong: within [0, 1] for "sigmoid",
            [0, 0.5) for "robust", 0 for the others.
        loss_type: one of the four above.
        reduction: "mean" (0 of no pairs), "sum" or "none".

    Returns:
        A scalar in fp32 (fp64 for fp64), or (B,) for "none".

    Raises:
        ValueError: shapes that differ, one reference without the other, or an option not allowed.

    Source: Rafailov et al. 2023, arXiv 2305.18290; smoothing: Mitchell 2023, "A note on DPO with
    noisy preferences"; robust: Chowdhury et al. 2024, arXiv 2403.00409; hinge: Zhao et al. 2023,
    arXiv 2305.10425; IPO: Azar et al. 2023, arXiv 2310.12036.

    Example:
        >>> chosen, rejected = torch.tensor([-10.0]), torch.tensor([-12.0])
        >>> dpo_loss(chosen, rejected, chosen - 1, rejected + 1)
        tensor(0.5981)
    """
    check_shapes(
        "dpo_loss",
        chosen_log_probs.shape,
        rejected_log_probs=rejected_log_probs,
        ref_chosen_log_probs=ref_chosen_log_probs,
        ref_rejected_log_probs=ref_rejected_log_probs,
    )
    _check_options(beta, label_smoothing, loss_type)
    if (ref_chosen_log_probs is None) != (ref_rejected_log_probs is None):
        raise ValueError("dpo_loss: one reference is missing: pass both, or none")
    margin = wide(chosen_log_probs) - wide(rejected_log_probs)
    if ref_chosen_log_probs is not None and ref_rejected_log_probs is not None:
        margin = margin - (wide(ref_chosen_log_probs) - wide(ref_rejected_log_probs))
    if loss_type == "hinge":
        losses = (1.0 - beta * margin).relu()
    elif loss_type == "ipo":
        losses = (margin - 0.5 / beta).square()
    else:
        right, wrong = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
        if loss_type == "sigmoid":
            losses = (1.0 - label_smoothing) * right + label_smoothing * wrong
        else:
            losses = (1.0 - label_smoothing) * right - label_smoothing * wrong
            losses = losses / (1.0 - 2.0 * label_smoothing)
    return reduced("dpo_loss", losses, reduction)


def _check_options(beta: float, label_smoothing: float, loss_type: str) -> None:
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"dpo_loss: loss_type={loss_type!r}: allowed are {', '.join(LOSS_TYPES)}")
    if not beta > 0.0:
        raise ValueError(f"dpo_loss: beta={beta}: allowed are numbers above 0")
    is_allowed = {
        "sigmoid": 0.0 <= label_smoothing <= 1.0,
        "robust": 0.0 <= label_smoothing < 0.5,
    }.get(loss_type, label_smoothing == 0.0)
    if not is_allowed:
        raise ValueError(
            f"dpo_loss: label_smoothing={label_smoothing} with {loss_type!r}: allowed are 0 to 1 "
            "with 'sigmoid', 0 to below 0.5 with 'robust', 0 with the others"
        )
