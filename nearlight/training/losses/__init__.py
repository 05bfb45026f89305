"""Losses of preference and policy optimization on log-probabilities of tokens.

`nearlight.ops.linear_log_prob` gives these, and entropies, from hidden states without storing
logits; all here is plain PyTorch on a number per token, so gradients go through to the head.
"""

from nearlight.training.losses.dpo_loss import dpo_loss
from nearlight.training.losses.group_advantages import group_advantages
from nearlight.training.losses.grpo_loss import grpo_loss
from nearlight.training.losses.kl_penalty import kl_penalty
from nearlight.training.losses.kto_loss import kto_loss
from nearlight.training.losses.orpo_loss import orpo_loss
from nearlight.training.losses.ppo_loss import ppo_loss
from nearlight.training.losses.sequence_log_prob import sequence_log_prob

__all__ = [
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "kl_penalty",
    "kto_loss",
    "orpo_loss",
    "ppo_loss",
    "sequence_log_prob",
]
