import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nearlight.profiler.imagined_gpu import fake_batch, fake_copy, imagined_gpu


def patched_things():
    return (
        nn.Module._apply,
        torch.autocast.__init__,
        F.scaled_dot_product_attention,
        torch._C._dispatch_dump_table("aten::layer_norm"),
    )


def test_everything_is_restored_even_after_an_exception():
    before = patched_things()
    with imagined_gpu():
        assert all(a is not b for a, b in zip(patched_things(), before, strict=True))
    assert patched_things() == before
    with pytest.raises(RuntimeError, match="planned"), imagined_gpu():
        raise RuntimeError("planned")
    assert patched_things() == before
    assert not isinstance(torch.zeros(1), FakeTensor)
    with torch.autocast("cpu", torch.bfloat16):
        # CPU autocast runs layer_norm in bf16 again.
        assert F.layer_norm(torch.zeros(2, 4, dtype=torch.bfloat16), (4,)).dtype == torch.bfloat16


def test_device_arguments_mean_the_cpu():
    with imagined_gpu():
        x = torch.zeros(2, device="cuda")
        y = torch.ones(2).to("cuda:0").cuda().pin_memory()
        z = torch.zeros(2).to(torch.device("cuda", 1), torch.bfloat16)
        with torch.device("cuda"):
            w = torch.rand(2)
        assert all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in (x, y, z, w))
        assert z.dtype == torch.bfloat16


def test_moving_and_casting_a_module_keeps_ties():
    with imagined_gpu():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        weight = model[0].weight
        assert model.cuda()[0].weight is weight
        assert model.to("cuda")[0].weight is weight
        model.half()
        assert model[0].weight.dtype == torch.float16
        assert model[0].weight is model[1].weight
        assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.requires_grad
        assert model[2].running_mean.dtype == torch.float16
        assert model[2].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_cudas_list(dtype):
    with imagined_gpu():
        x, w = torch.zeros(4, 8), torch.zeros(8, 8)
        with torch.autocast("cuda", dtype):
            low = F.linear(x, w)
            assert low.dtype == dtype
            full = {
                "layer_norm": F.layer_norm(low, (8,)),
                "softmax": low.softmax(-1),
                "log_softmax": low.log_softmax(-1),
                "sum": low.sum(-1),
                "pow": low.pow(2),
                "rsqrt": low.rsqrt(),
                "exp": low.exp(),
            }
            assert {name: t.dtype for name, t in full.items()} == dict.fromkeys(full, torch.float32)
            assert (low + low).dtype == dtype
            q = torch.zeros(1, 1, 4, 8)
            assert F.scaled_dot_product_attention(q, q, q).dtype == dtype
        with torch.autocast("cuda", enabled=False):
            assert F.linear(x, w).dtype == torch.float32


def test_autocast_on_cuda_is_fp16_by_default():
    with imagined_gpu(), torch.autocast("cuda"):
        assert F.linear(torch.zeros(1, 8), torch.zeros(8, 8)).dtype == torch.float16


def test_a_copy_is_fake_and_tied_and_the_model_stays_real():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with imagined_gpu() as fake_mode:
        copy = fake_copy(model, fake_mode)
        assert copy is not model and isinstance(copy[0].weight, FakeTensor)
        assert copy[0].weight is copy[1].weight and copy[0].weight.requires_grad
        assert fake_copy(copy, fake_mode) is copy
        batch = fake_batch({"x": torch.ones(2, 4)}, fake_mode)
        assert isinstance(batch["x"], FakeTensor)
        assert copy(batch["x"]).shape == (2, 4)
    assert not isinstance(model[0].weight, FakeTensor)
