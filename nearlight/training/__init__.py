"""What a training step needs beside the model: optimizers over the ops."""

from nearlight.training.adamw import AdamW
from nearlight.training.muon import Muon

__all__ = ["AdamW", "Muon"]
