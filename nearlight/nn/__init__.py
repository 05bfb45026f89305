"""Modules over the ops, one readable Llama, and patching of live models."""

from nearlight.nn.compare import Comparison, compare_models
from nearlight.nn.layer_norm import LayerNorm
from nearlight.nn.linear_cross_entropy import LinearCrossEntropyLoss
from nearlight.nn.llama import Llama, LlamaConfig
from nearlight.nn.patch import Patched, is_patched, patch, unpatch
from nearlight.nn.rms_norm import RMSNorm
from nearlight.nn.rope import RotaryEmbedding
from nearlight.nn.swiglu import SwiGLUMLP

__all__ = [
    "Comparison",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "Llama",
    "LlamaConfig",
    "Patched",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "compare_models",
    "is_patched",
    "patch",
    "unpatch",
]
