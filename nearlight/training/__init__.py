"""What a training step needs beside the model: optimizers and losses over the ops."""

from nearlight.training.adamw import AdamW
from nearlight.training.losses import (
    dpo_loss,
    group_advantages,
    grpo_loss,
    kl_penalty,
    kto_loss,
    orpo_loss,
    ppo_loss,
    sequence_log_prob,
)
from nearlight.training.muon import Muon

__all__ = [
    "AdamW",
    "Muon",
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "kl_penalty",
    "kto_loss",
    "orpo_loss",
    "ppo_loss",
    "sequence_log_prob",
]
