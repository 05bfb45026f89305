import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlight.core.cost import formula_for
from nearlight.profiler import lowering
from nearlight.profiler.capture import trace

FORWARD = "aten::scaled_dot_product_attention"
BACKWARD = "aten::scaled_dot_product_attention_backward"


def attention(make_target, q, k, v, task="train", **options):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=q.dtype))

        def forward(self, q, k, v):
            scaled = (tensor * self.scale for tensor in (q, k, v))
            return F.scaled_dot_product_attention(*scaled, **options)

    step = trace(make_target(Attends(), {"q": q, "k": k, "v": v}, task))
    return {call.name: call for call in step.calls}


def heads(batch=2, heads=4, seq=128, dim=64, dtype=torch.bfloat16):
    return torch.zeros(batch, heads, seq, dim, dtype=dtype)


def test_flops_of_full_and_causal_attention(make_target):
    q = heads()
    full = attention(make_target, q, q, q)
    causal = attention(make_target, q, q, q, is_causal=True)
    assert full[FORWARD].cost.flops == {"bf16": 4 * 2 * 4 * 128 * 128 * 64}
    assert causal[FORWARD].cost.total_flops * 2 == full[FORWARD].cost.total_flops
    for calls in (full, causal):
        assert calls[BACKWARD].cost.total_flops == 2.5 * calls[FORWARD].cost.total_flops
    assert causal[FORWARD].cost.attention.is_causal and not full[FORWARD].cost.attention.is_causal


@pytest.mark.parametrize(
    ("queries", "keys", "pairs"), [(8, 8, 32), (4, 8, 8), (8, 4, 8 + 4 * 4), (1, 8, 0)]
)
def test_pairs_of_rectangular_causal_attention(queries, keys, pairs):
    q, k = heads(1, 1, queries, 16), heads(1, 1, keys, 16)
    assert lowering.attention_flops(q, k, k, True) == 2 * pairs * 32


def test_bytes_with_fewer_key_heads(make_target):
    q, k = heads(heads=8), heads(heads=2)
    calls = attention(make_target, q, k, k, enable_gqa=True)
    cost = calls[FORWARD].cost
    size_q, size_k, lse = q.numel() * 2, k.numel() * 2, 2 * 8 * 128 * 4
    assert cost.bytes_read == size_q + 2 * size_k
    assert cost.bytes_written == size_q + lse
    back = calls[BACKWARD].cost
    assert back.bytes_read == 3 * size_q + 2 * size_k + lse
    assert back.bytes_written == size_q + 2 * size_k
    assert cost.total_flops == 4 * 2 * 8 * 128 * 128 * 64


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.1}, {"attn_mask": torch.ones(128, 128).bool()}]
)
def test_attention_is_one_op_with_dropout_and_masks(make_target, options):
    q = heads(dtype=torch.float16)
    calls = attention(make_target, q, q, q, **options)
    assert FORWARD in calls and BACKWARD in calls
    assert "aten::_softmax" not in calls and "aten::bmm" not in calls


@pytest.mark.parametrize(
    ("dtype", "head_dim", "backend"),
    [
        (torch.bfloat16, 128, "flash"),
        (torch.float16, 256, "flash"),
        (torch.float32, 64, "efficient"),
        (torch.float64, 64, "math"),
        (torch.bfloat16, 512, "math"),
    ],
)
def test_the_backend_by_dtype_and_width(make_target, dtype, head_dim, backend):
    assert lowering.attention_backend(dtype, head_dim) == backend
    q = heads(dim=head_dim, dtype=dtype)
    calls = attention(make_target, q, q, q, "prefill")
    assert (FORWARD in calls) == (backend != "math")
    assert ("aten::_softmax" in calls or "aten::_safe_softmax" in calls) == (backend == "math")


def test_three_dimensions_and_layout(make_target):
    q = torch.zeros(4, 16, 32)
    calls = attention(make_target, q, q, q, "prefill")
    assert calls[FORWARD].cost.total_flops == 4 * 4 * 16 * 16 * 32
    out = torch.ops.nearlight_trace.attention_fwd
    with torch._subclasses.FakeTensorMode():
        q = heads()
        result = out(q, q, q, None, False)[0]
    assert result.transpose(1, 2).is_contiguous()  # no copy before the output projection


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_ops_of_a_real_gpu_have_the_same_cost_and_name(kind):
    forward = f"aten::_scaled_dot_product_{kind}_attention"
    assert lowering.plain_name(forward) == FORWARD
    assert lowering.plain_name(forward + "_backward") == BACKWARD
    assert lowering.plain_name("aten::mm") == "aten::mm"
    op = getattr(torch.ops.aten, forward.removeprefix("aten::")).default
    q = heads()
    values = {"query": q, "key": q, "value": q, "is_causal": True}
    args = [values.get(argument.name) for argument in op._schema.arguments]
    cost = formula_for(forward)(args, {}, (q, torch.zeros(2, 4, 128)))
    assert cost.total_flops == lowering.attention_flops(q, q, q, True)
    back_op = getattr(torch.ops.aten, forward.removeprefix("aten::") + "_backward").default
    values |= {"grad_out": q, "grad_out_": q}
    args = [values.get(argument.name) for argument in back_op._schema.arguments]
    back = formula_for(forward + "_backward")(args, {}, (q, q, q))
    assert back.total_flops == 2.5 * cost.total_flops and back.attention.is_causal
