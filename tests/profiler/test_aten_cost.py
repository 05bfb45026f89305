import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlight.profiler import aten_cost
from nearlight.profiler.capture import trace


def calls_of(make_target, function, *tensors, task="prefill", optimizer="adamw-fused"):
    class Runs(nn.Module):
        def forward(self, **inputs):
            return function(*inputs.values())

    batch = {f"input_{i}": tensor for i, tensor in enumerate(tensors)}
    return trace(make_target(Runs(), batch, task), optimizer).calls


def cost_of(name, make_target, function, *tensors):
    found = [c for c in calls_of(make_target, function, *tensors) if c.name == name]
    assert len(found) == 1, found
    return found[0].cost


def test_matmul(make_target):
    a, b = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(32, 16, dtype=torch.bfloat16)
    cost = cost_of("aten::mm", make_target, torch.mm, a, b)
    assert cost.flops == {"bf16": 2 * 64 * 32 * 16}
    assert (cost.bytes_read, cost.bytes_written) == (2 * (64 * 32 + 32 * 16), 2 * 64 * 16)
    batched = cost_of("aten::bmm", make_target, torch.bmm, a[None], b[None])
    assert batched == cost


def test_fp32_products_take_tf32_only_when_allowed(make_target):
    a = torch.zeros(8, 8)
    assert set(cost_of("aten::mm", make_target, torch.mm, a, a).flops) == {"fp32"}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert set(cost_of("aten::mm", make_target, torch.mm, a, a).flops) == {"tf32"}
    finally:
        torch.set_float32_matmul_precision(before)


def test_addmm_reads_its_bias(make_target):
    x, w, bias = torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(2)
    cost = cost_of("aten::addmm", make_target, F.linear, x, w, bias)
    assert cost.total_flops == 2 * 4 * 8 * 2
    # The bias is expanded over the rows and stored once.
    assert cost.bytes_read == 4 * (4 * 8 + 2 * 8 + 2)


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 1), (1, 2)])
def test_convolution_forward_and_backward(make_target, groups, stride):
    class Convolves(nn.Module):
        def __init__(self):
            super().__init__()
            first = nn.Conv2d(4, 4, 1)
            self.layers = nn.Sequential(
                first, nn.Conv2d(4, 6, 3, stride, 1, groups=groups, dtype=torch.float32)
            )

        def forward(self, x):
            return self.layers(x)

    step = trace(make_target(Convolves(), {"x": torch.zeros(2, 4, 8, 8)}))
    out = 8 // stride
    flops = 2 * (2 * 6 * out * out) * (4 // groups) * 9
    forward = [c for c in step.calls if c.name == "aten::convolution"][1]
    backward = next(c for c in step.calls if c.name == "aten::convolution_backward")
    pipe = "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    assert forward.cost.flops == {pipe: flops}
    assert backward.cost.flops == {pipe: 2 * flops}
    assert forward.cost.pattern == "matmul"


def test_embedding_reads_only_the_rows_asked_for(make_target):
    table, ids = torch.zeros(1000, 16), torch.zeros(4, 8, dtype=torch.long)
    cost = cost_of("aten::embedding", make_target, lambda i, t: F.embedding(i, t), ids, table)
    assert cost.bytes_read == 32 * 16 * 4 + 32 * 8
    assert cost.bytes_written == 32 * 16 * 4


def test_embedding_backward_writes_the_whole_table(make_target):
    model = nn.Embedding(1000, 16)
    step = trace(make_target(model, {"input": torch.zeros(4, 8, dtype=torch.long)}))
    (call,) = [c for c in step.calls if c.name == "aten::embedding_dense_backward"]
    assert call.cost.bytes_read == 32 * 16 * 4 + 32 * 8
    assert call.cost.bytes_written == 1000 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_reads_four_and_writes_three_arrays(make_target, dtype):
    model = nn.Linear(512, 512, bias=False, dtype=dtype)
    step = trace(make_target(model, {"input": torch.zeros(4, 512, dtype=dtype)}))
    (call,) = [c for c in step.calls if c.name == "aten::_fused_adamw_"]
    size = 512 * 512 * dtype.itemsize
    assert call.cost.bytes_read == 4 * size + 4  # the step count, too
    assert call.cost.bytes_written == 3 * size + 4


def test_unfused_optimizers_move_more_in_more_kernels(make_target):
    def optimizer_cost(name):
        calls = [c.cost for c in trace(make_target(), name).calls if c.phase == "optimizer"]
        return sum(c.bytes for c in calls), sum(c.num_kernels for c in calls)

    fused, foreach = optimizer_cost("adamw-fused"), optimizer_cost("adamw-foreach")
    loop = optimizer_cost("adamw-loop")
    assert fused[0] < foreach[0] and fused[1] < foreach[1] < loop[1]


def test_in_place_ops_write_what_they_change(make_target):
    x, y = torch.zeros(100), torch.zeros(100)
    add = cost_of("aten::add_", make_target, lambda x, y: x.clone().add_(y), x, y)
    assert (add.bytes_read, add.bytes_written) == (800, 400)
    copy = cost_of("aten::copy_", make_target, lambda x, y: x.clone().copy_(y), x, y)
    assert (copy.bytes_read, copy.bytes_written) == (400, 400)
    fill = cost_of("aten::fill_", make_target, lambda x: x.clone().fill_(1.0), x)
    assert (fill.bytes_read, fill.bytes_written) == (0, 400)


def test_casts_and_broadcasts(make_target):
    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    cast = cost_of("aten::_to_copy", make_target, lambda x: x.float(), x)
    assert (cast.bytes_read, cast.bytes_written) == (64 * 32 * 2, 64 * 32 * 4)
    row = torch.zeros(1, 32, dtype=torch.bfloat16)
    mul = cost_of("aten::mul", make_target, lambda x, r: x * r.expand(64, 32), x, row)
    assert mul.bytes_read == 2 * (64 * 32 + 32)


def test_nll_loss_touches_one_number_a_row(make_target):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 100)

        def forward(self, x):
            return F.cross_entropy(self.head(x), torch.zeros(6, dtype=torch.long))

    step = trace(make_target(Loss(), {"x": torch.zeros(6, 8)}, loss_fn=lambda m, b: m(**b)))
    cost = {call.name: call.cost for call in step.calls}
    assert cost["aten::nll_loss_forward"].bytes_read == 6 * 4 + 6 * 8
    assert cost["aten::nll_loss_backward"].bytes_written == 6 * 100 * 4
    assert cost["aten::_log_softmax"].bytes == 2 * 6 * 100 * 4


def test_which_elementwise_kernels_are_not_vectorised(make_target):
    x = torch.zeros(4, 8, 16)

    def is_strided(function, *tensors):
        return calls_of(make_target, function, *tensors)[-1].is_strided

    assert not is_strided(lambda x: x * x, x)
    assert not is_strided(lambda x: x.transpose(0, 1) * 2.0, x)  # dense in one order
    assert is_strided(lambda x, y: x * y, x, torch.zeros(16))
    assert is_strided(lambda x: x[..., ::2] * 2.0, x)
    assert not is_strided(lambda x: x.sum(-1), x)  # no element-wise op


def test_every_stream_name_is_an_op_of_torch():
    for name in (*aten_cost._STREAMS, *aten_cost._KERNELS):
        assert hasattr(torch.ops.aten, name), name
