"""AdamW against torch's own: values, state dicts, schedulers, scaling, shards, refusals."""

import copy

import pytest
import torch

from nearlight.core.blockwise import state_bytes
from nearlight.training import AdamW


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.5, "eps": 1e-3}])
def test_adamw_in_fp64_is_torchs(backend, options, parameters, train):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    train(AdamW(ours, lr=0.1, backend=backend, **options), ours)
    train(torch.optim.AdamW(theirs, lr=0.1, foreach=False, **options), theirs)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-14)


def test_bf16_parameters_keep_fp32_moments_through_a_state_dict(parameters, train):
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = (AdamW(each, backend="triton") for each in (params, others))
    train(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    for param, loaded in zip(params, others, strict=True):
        loaded.data.copy_(param)
        assert other.state[loaded]["exp_avg"].dtype == torch.float32
        for name, value in optimizer.state[param].items():
            assert torch.equal(other.state[loaded][name], value)
            assert other.state[loaded][name].data_ptr() != value.data_ptr() or not value.numel()
    train(optimizer, params, first=5)
    train(other, others, first=5)
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_torchs_state_dict_can_be_loaded(state, parameters, train):
    ours, theirs = parameters(), parameters()
    trained = torch.optim.AdamW(theirs, lr=0.03, betas=(0.8, 0.9))
    train(trained, theirs)
    optimizer = AdamW(ours, state=state, backend="triton")
    optimizer.load_state_dict(trained.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert optimizer.param_groups[0]["state"] == state
    assert "foreach" not in optimizer.param_groups[0]
    for one, two in zip(ours, theirs, strict=True):
        one.data.copy_(two)
    is_narrow = optimizer.state[ours[-1]]["exp_avg"].dtype == torch.uint8
    assert is_narrow == (state == "8bit")
    train(optimizer, ours, 1, first=5)
    train(trained, theirs, 1, first=5)
    for one, two in zip(ours, theirs, strict=True):
        # 8 bits of a moment are worth a share of one step.
        atol = 1e-6 if one.numel() < 4096 or state == "fp32" else 0.03
        torch.testing.assert_close(one, two, rtol=1e-5, atol=atol)


def test_a_scheduler_closures_and_zero_grad_work_as_with_torch(parameters):
    (param,) = parameters(shapes=((4,),))
    optimizer = AdamW([param], lr=1.0, weight_decay=0.0, backend="triton")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = param.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == before.sum()
    torch.testing.assert_close(param.detach(), before - 1.0)
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(param.detach(), before - 1.5)


def test_a_step_with_a_tensor_as_learning_rate_follows_it_and_reads_nothing_on_the_host(
    parameters, train
):
    params, others = parameters(), parameters()
    lr = torch.tensor(0.1)
    optimizer, other = AdamW(params, lr=lr, backend="triton"), AdamW(others, 0.1, backend="triton")
    for rate in (0.1, 0.01):
        lr.fill_(rate)
        other.param_groups[0]["lr"] = float(lr)
        train(optimizer, params, 1)
        train(other, others, 1)
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


def test_a_gradient_scaler_skips_a_step_whole(parameters, give_gradients, train):
    params = parameters(shapes=((64, 65), (3,)))
    optimizer = AdamW(params, state="8bit", backend="triton")
    train(optimizer, params, 2)
    before = copy.deepcopy([[p.detach(), optimizer.state[p]] for p in params])
    give_gradients(params, 9)
    params[0].grad[0, 0] = torch.inf
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    for param, (value, state) in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert all(torch.equal(optimizer.state[param][name], old) for name, old in state.items())
    optimizer.found_inf = torch.tensor(0.0)
    give_gradients(params, 9, scale=4.0)
    gradient = params[0].grad.clone()
    optimizer.step()
    assert torch.equal(params[0].grad, gradient)
    assert optimizer.state[params[0]]["step"] == 3 and not torch.equal(params[1], before[1][0])


# A precision that depends on the size of a shard; uneven shards.
@pytest.mark.parametrize(("shape", "num_shards"), [((6, 1024), 2), ((41, 1280), 4), ((64, 256), 3)])
def test_eight_bits_do_not_depend_on_how_a_tensor_is_sharded(
    shape, num_shards, parameters, give_gradients
):
    (whole,) = parameters(shapes=(shape,))
    shards = [torch.nn.Parameter(x.clone()) for x in whole.detach().chunk(num_shards)]
    optimizer = AdamW([whole], state="8bit", backend="triton")
    other = AdamW(shards, state="8bit", min_8bit_size=0, backend="triton")
    for step in range(3):
        give_gradients([whole], step)
        for shard, gradient in zip(shards, whole.grad.chunk(num_shards), strict=True):
            shard.grad = gradient
        optimizer.step()
        other.step()
    assert torch.equal(torch.cat([*shards]), whole)
    assert optimizer.state[whole]["exp_avg"].shape == (state_bytes(whole.numel()),)


def test_small_tensors_keep_fp32_and_eight_bits_follow_fp32(parameters, train):
    params, others = parameters(), parameters()
    start = others[-1].detach().clone()
    optimizer, other = AdamW(params, state="8bit", backend="triton"), AdamW(others)
    train(optimizer, params, 10)
    train(other, others, 10)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(params[1], others[1])
    error = (params[-1] - others[-1]).norm() / (others[-1] - start).norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_permuted_parameter_steps_as_a_contiguous_one(state, give_gradients):
    values = torch.randn(80, 70, generator=torch.Generator().manual_seed(3))
    permuted, flat = torch.nn.Parameter(values.t()), torch.nn.Parameter(values.clone())
    assert not permuted.is_contiguous()
    options = {"state": state, "backend": "triton"}
    optimizer, other = AdamW([permuted], **options), AdamW([flat], **options)
    for step in range(3):
        give_gradients([flat], step)
        permuted.grad = flat.grad.t().contiguous()
        optimizer.step()
        other.step()
    assert torch.equal(permuted.t(), flat)


def test_stochastic_rounding_moves_weights_that_nearest_leaves():
    weight, other = (torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2))
    # A step of 1/8 of a unit in the last place.
    options = {"lr": 2.0**-11, "weight_decay": 0.0, "backend": "triton"}
    optimizer = AdamW([weight], stochastic_rounding=True, **options)
    nearest = AdamW([other], **options)
    for _ in range(4):
        weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
        optimizer.step()
        nearest.step()
    assert bool((other == 1).all())
    assert abs(float(weight.detach().float().mean()) - (1 - 4 * 2.0**-11)) < 2e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"state": "4bit"}, "8bit"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_adamw_refuses_in_words(options, words, parameters):
    with pytest.raises(ValueError, match=words):
        AdamW(parameters(), **options)


def test_a_sparse_gradient_and_amsgrads_state_dict_are_refused(parameters):
    (param,) = parameters(shapes=((4, 2),))
    optimizer = AdamW([param])
    param.grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW([param], amsgrad=True).state_dict())
