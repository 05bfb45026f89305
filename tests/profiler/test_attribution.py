import pytest
import torch
from torch import nn

from nearlight.profiler.attribution import Attribution, module_names
from nearlight.profiler.capture import trace


def test_backward_ops_belong_to_the_module_of_their_forward_op(make_target):
    step = trace(make_target())
    products = [call for call in step.calls if call.cost.pattern == "matmul"]
    counts = {}
    for call in products:
        key = (call.place.module, call.phase)
        counts[key] = counts.get(key, 0) + 1
    for layer in (0, 1):
        for part in ("up", "down"):
            assert counts[f"layers.{layer}.{part}", "forward"] == 1
            assert counts[f"layers.{layer}.{part}", "backward"] == 2
    norms = [c for c in step.calls if c.name == "aten::native_layer_norm_backward"]
    assert [c.place.module for c in norms] == ["layers.1.norm", "layers.0.norm"]
    relu = [c for c in step.calls if c.name == "aten::threshold_backward"]
    assert {c.place.module_class for c in relu} == {"Block"}


def test_places_name_the_function_and_line_of_the_program(make_target):
    def helper(x):
        return x * 2

    class Calls(nn.Module):
        def forward(self, x):
            return helper(x).cos()

    step = trace(make_target(Calls(), {"x": torch.zeros(4)}, "prefill"))
    multiply, cosine = step.calls[:2]
    assert (multiply.place.function, cosine.place.function) == ("helper", "forward")
    assert multiply.place.line.startswith("test_attribution.py:")
    assert multiply.place.module == "Calls"  # the model itself goes by its class


def test_the_optimizer_has_no_module(make_target):
    step = trace(make_target())
    assert {c.place.module for c in step.calls if c.phase == "optimizer"} == {""}


def test_hooks_are_gone_after_an_exception():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("planned")

    hooks = nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    model = Fails()
    attribution = Attribution(model)
    with pytest.raises(RuntimeError, match="planned"), attribution.watching():
        model(torch.zeros(1))
    after = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    assert after == before


def test_a_caught_exception_does_not_shift_the_modules_after_it(make_target):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("planned")

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Fails(), nn.ReLU()

        def forward(self, x):
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x).neg()

    step = trace(make_target(Tries(), {"x": torch.zeros(4)}, "prefill"))
    places = [(c.name, c.place.module) for c in step.calls[:2]]
    assert places == [("aten::relu", "good"), ("aten::neg", "Tries")]


def test_names_of_modules():
    model = nn.Sequential(nn.ReLU())
    names = module_names(model)
    assert names[id(model)] == "Sequential" and names[id(model[0])] == "0"
