import pytest
import torch

from nearlight.ops import OPS
from nearlight.ops._softmax_record import check, reference


def inputs_of(words: str):
    (case, *_) = [case for case in OPS["softmax"].check_cases if words in case.name]
    return OPS["softmax"].make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))


def test_rows_are_of_five_kinds():
    x = inputs_of("5x129")["x"].detach()
    assert x.softmax(-1)[1, 0] > 0.99  # confident
    assert x[0].std() == pytest.approx(1, abs=0.2) and x[2].abs().max() < 1e-2
    assert x[3].std() == pytest.approx(30, abs=6) and x[4].mean() == pytest.approx(20, abs=1)


@pytest.mark.parametrize("kind", ["bool", "additive", "row"])
def test_masks_take_out_a_whole_row_where_they_have_rows(kind):
    given = inputs_of(f"mask={kind}")
    mask = given["mask"]
    is_out = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    assert is_out.any() and not is_out.all() and given["scale"] == -0.5
    assert len(mask) == 1 if kind == "row" else is_out[1].all()


@pytest.mark.parametrize(("is_log", "out"), [(False, 0.0), (True, -torch.inf)])
def test_what_a_mask_takes_out_has_no_share_and_no_gradient(is_log, out):
    x = torch.tensor([[1.0, torch.nan, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    keep = torch.tensor([[True, False, True], [False, False, False]])
    y = reference(x, 2.0, keep, is_log)
    whole = torch.tensor([2.0, 6.0]).softmax(0)
    torch.testing.assert_close(y[0, ::2], whole.log() if is_log else whole)
    assert (y[~keep] == out).all()
    (dx,) = torch.autograd.grad(y[keep].square().sum(), x)
    assert (dx[~keep] == 0).all() and dx[keep].abs().min() > 0


def test_refusals():
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match="some: x is torch.int64; allowed are fp16"):
        check("some", x.long(), None)
    with pytest.raises(TypeError, match="x is torch.float32 with a mask of torch.int64; allowed"):
        check("some", x, x.long())
    with pytest.raises(ValueError, match=r"some: x has shape \(\); allowed is \(\.\.\., N\)"):
        check("some", torch.tensor(1.0), None)
    for mask in (x[:, :3], x[None], x.to("meta")):
        with pytest.raises(
            ValueError, match=r"some: mask has shape .*must broadcast to x \(2, 4\)"
        ):
            check("some", x, mask)
    with pytest.raises(ValueError, match="some: the mask gets no gradient; detach it"):
        check("some", x, x.clone().requires_grad_())
    check("some", x, x[:1].bool())


def test_registers_leave_room_for_32_warps():
    for build in OPS["softmax"].builds("sm_90a"):
        assert build.max_registers == min(144, 65536 // (32 * build.num_warps))


def test_only_the_softmax_has_ligers_beside_torchs():
    assert set(OPS["softmax"].peers) == {"torch", "liger"}
    assert set(OPS["log_softmax"].peers) == {"torch"}
