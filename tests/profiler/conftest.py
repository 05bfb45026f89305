"""Small models and their targets, and one traced step of Llama-3.2-1B."""

import pytest
import torch
from torch import nn

from nearlight.core.hardware import find_gpu
from nearlight.profiler.capture import trace
from nearlight.profiler.target import from_model, load


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def make_target():
    """Return a target of a small network, or of any module with a batch."""

    def make(model=None, batch=None, task="train", loss_fn=None):
        model = Net() if model is None else model
        batch = {"x": torch.zeros(8, 16, 64)} if batch is None else batch
        loss_fn = loss_fn or (lambda m, b: m(**b).float().pow(2).mean())
        return from_model(model, batch, task, loss_fn)

    return make


@pytest.fixture(scope="session")
def h200():
    return find_gpu("h200")


@pytest.fixture(scope="session")
def llama_1b():
    """The case that was measured on an H200: 666.7 ms and 107.8 GiB."""
    return trace(load("llama-3.2-1b", batch=8, seq=4096))


@pytest.fixture
def make_llama():
    """Return a target of a small Llama with sizes of choice."""

    def make(batch=4, seq=64, task="train", attention="sdpa", mask=None, **sizes):
        import transformers

        config = transformers.LlamaConfig(
            **{
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 1000,
                "use_cache": False,
            }
            | sizes
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        model = model.to_empty(device="cpu")
        ids = torch.zeros(batch, seq, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids}
        if mask is not None:
            inputs["attention_mask"] = mask
        return from_model(model, inputs, task)

    return make
