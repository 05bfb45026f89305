"""A linear layer with a low-rank adapter (LoRA), its frozen weight and its dropout in few passes.

    y = x · Wᵀ + bias + scale · dropout(x) · Aᵀ · Bᵀ
    dl = scale · dy · B          dA = dlᵀ · dropout(x)          dB = scale · dyᵀ · l
    dx = dy · W + keep / (1 − p) ∘ (dl · A)          dW = dyᵀ · x          dbias = Σ dy

Legend: ... (or M) rows, K inner and N outer width, R rank, l = dropout(x) · Aᵀ.
Passes: the forward reads x once beside the large product, and that product adds to what the adapter
wrote; the backward reads dy twice and x once, and writes dx. No mask and no dropped x is stored.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685);
dtypes and scales as in PEFT.
Limits: no second derivative; one adapter; the dropout's limits are those of `dropout`.
"""

from nearlight.ops.lora_linear.function import lora_linear, reference
from nearlight.ops.lora_linear.record import OP

__all__ = ["OP", "lora_linear", "reference"]
