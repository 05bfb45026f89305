from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nearlight.core import backend
from nearlight.ops.linear_cross_entropy import linear_cross_entropy

GIVEN = {
    "x": torch.zeros(8, 6),
    "weight": torch.zeros(15, 6),
    "labels": torch.zeros(8, dtype=torch.int64),
}
BAD = {
    "dtypes differ": ({"weight": torch.zeros(15, 6, dtype=torch.bfloat16)}, TypeError, "autocast"),
    "integer x": ({"x": torch.zeros(8, 6, dtype=torch.int64)}, TypeError, "int64"),
    "int32 labels": ({"labels": torch.zeros(8, dtype=torch.int32)}, TypeError, "long"),
    "width": ({"x": torch.zeros(8, 7)}, ValueError, r"\(15, 7\)"),
    "rows": ({"labels": torch.zeros(7, dtype=torch.int64)}, ValueError, r"\(8,\)"),
    "bias": ({"bias": torch.zeros(14)}, ValueError, r"\(15,\)"),
    "class weight": ({"class_weight": torch.zeros(8)}, ValueError, r"\(15,\)"),
    "token weight": ({"token_weight": torch.zeros(15)}, ValueError, r"\(8,\)"),
    "learned weight": (
        {"token_weight": torch.zeros(8, requires_grad=True)},
        ValueError,
        "detach",
    ),
    "device": ({"weight": torch.zeros(15, 6, device="meta")}, ValueError, "meta"),
    "weight of 3 dimensions": ({"weight": torch.zeros(1, 15, 6)}, ValueError, r"\(V, H\)"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "0 to 1"),
    "z_loss": ({"z_loss": -1.0}, ValueError, "0 and more"),
    "softcap": ({"softcap": 0.0}, ValueError, "above 0"),
    "reduction": ({"reduction": "avg"}, ValueError, "mean, sum, none"),
    "num_items of a mean": ({"num_items": 3}, ValueError, "reduction='sum'"),
    "negative num_items": ({"num_items": -3, "reduction": "sum"}, ValueError, "0 and more"),
    "num_items of many": (
        {"num_items": torch.ones(2), "reduction": "sum"},
        ValueError,
        "0-d",
    ),
    "budget": ({"memory_budget_bytes": 0}, ValueError, "1 and more"),
    "backend": ({"backend": "cuda"}, ValueError, "auto, triton, reference"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_allowed(name: str):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**GIVEN, **changes})


class Names(TorchDispatchMode):
    """Notes the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


def test_traces_on_fake_tensors_as_two_ops():
    # What the prediction sees: no logits, and no pass over the gradients in the backward.
    with FakeTensorMode(), backend.force("triton"), Names() as seen:
        x = torch.empty(32_768, 4096, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(128_256, 4096, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(32_768, dtype=torch.int64)
        loss = linear_cross_entropy(x, weight, labels)
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        assert not any("mm" in name for name in seen.names)
        num_forward = len(seen.names)
        loss.backward()
        assert weight.grad.shape == weight.shape
    assert "nearlight::linear_cross_entropy_fwd" in seen.names
    # Besides it the gradient of the loss is made and others are detached: nothing is zeroed,
    # multiplied or copied.
    backward = set(seen.names[num_forward:]) - {"aten::ones_like", "aten::detach", "prim::device"}
    assert backward == {"nearlight::linear_cross_entropy_scale_"}


def test_num_items_on_a_fake_device_needs_no_value():
    with FakeTensorMode(), backend.force("triton"):
        x, weight = torch.empty(8, 6), torch.empty(15, 6)
        items, labels = torch.tensor(3), torch.zeros(8, dtype=torch.int64)
        loss = linear_cross_entropy(x, weight, labels, reduction="sum", num_items=items)
        assert loss.shape == ()
