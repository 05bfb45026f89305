from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from nearlight.core import backend
from nearlight.nn import SwiGLUMLP


@pytest.mark.parametrize("forced", ["reference", "triton"])
@pytest.mark.parametrize("bias", [True, False])
def test_is_llamas_and_takes_its_state(bias: bool, forced: backend.Backend) -> None:
    theirs = LlamaMLP(
        LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=4, mlp_bias=bias)
    )
    ours = SwiGLUMLP(16, 40, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 16)
    with backend.force(forced):
        torch.testing.assert_close(ours(x), theirs(x))
