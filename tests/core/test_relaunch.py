"""A launch again: the same compiled kernel for what Triton takes for the same, and for no more."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from nearlight.core import relaunch
from nearlight.core.relaunch import Relaunch
from nearlight.core.triton import jit


@jit
def _kernel(x_ptr, N, factor, BLOCK: tl.constexpr, ACC: tl.constexpr = tl.float32):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, (tl.load(x_ptr + offsets).to(ACC) * factor), offsets < N)


class Compiled:
    """Stands for what Triton compiled, and writes its launches down."""

    function, packed_metadata = "function", "packed"

    def __init__(self):
        self.launches = []
        self.run = lambda *args: self.launches.append(args)


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    compiled = []

    again = Relaunch(_kernel)

    def launch(*args, grid=(3,), device=0, **kwargs):
        key = again.key(device, args, kwargs)
        if key is not None and (found := again.find(key)) is not None:
            return again.launch(found, device, grid, args, kwargs)
        compiled.append(Compiled())
        if key is not None:
            again.keep(key, compiled[-1], len(args))
        return compiled[-1]

    launch.compiled = compiled
    return launch


X = torch.zeros(64)


def test_the_second_launch_is_the_compiled_kernel_with_all_arguments_in_order(launch):
    first = launch(X, 5, factor=2.0, BLOCK=16)
    other = torch.zeros(128)
    assert launch(other, 7, factor=3.0, BLOCK=16, grid=lambda meta: (meta["BLOCK"], 2)) is first
    assert len(launch.compiled) == 1
    (made,) = first.launches
    assert made[:9] == (16, 2, 1, 7, "function", "packed", None, None, None)
    assert made[9] is other and made[10:] == (7, 3.0, 16, tl.float32)


def test_what_triton_compiles_anew_is_compiled_anew(launch):
    launch(X, 5, 2.0, BLOCK=16)
    for again in (
        lambda: launch(X.half(), 5, 2.0, BLOCK=16),
        lambda: launch(X[1:], 5, 2.0, BLOCK=16),
        lambda: launch(X, 1, 2.0, BLOCK=16),
        lambda: launch(X, 32, 2.0, BLOCK=16),
        lambda: launch(X, 2**31 + 1, 2.0, BLOCK=16),
        lambda: launch(X, 5, None, BLOCK=16),
        lambda: launch(X, 5, 2.0, BLOCK=32),
        lambda: launch(X, 5, 2.0, BLOCK=16, num_warps=8),
        lambda: launch(X, 5, 2.0, BLOCK=16, ACC=tl.float16),
        lambda: launch(X, 5, 2.0, BLOCK=16, device=1),
    ):
        before = len(launch.compiled)
        again()
        again()
        assert len(launch.compiled) == before + 1


def test_who_hooks_into_launches_sees_them_all(launch, monkeypatch):
    for place, hook in (("launch_enter_hook", print), ("launch_exit_hook", print)):
        chain = getattr(knobs.runtime, place)
        launch(X, 5, 2.0, BLOCK=16)
        before = len(launch.compiled)
        chain.add(hook)
        try:
            launch(X, 5, 2.0, BLOCK=16)
        finally:
            chain.remove(hook)
        assert len(launch.compiled) == before + 1
    monkeypatch.setattr(_kernel, "pre_run_hooks", [print])
    before = len(launch.compiled)
    launch(X, 5, 2.0, BLOCK=16)
    assert len(launch.compiled) == before + 1


def test_a_changed_global_or_source_is_tritons_to_judge(launch, monkeypatch):
    namespace = {"SIZE": 3}
    monkeypatch.setattr(_kernel, "used_global_vals", {("SIZE", 0): (3, namespace)})
    for change in (lambda: namespace.update(SIZE=4), namespace.clear):
        launch(X, 5, 2.0, BLOCK=16)
        before = len(launch.compiled)
        change()
        launch(X, 5, 2.0, BLOCK=16)
        assert len(launch.compiled) == before + 1
        namespace["SIZE"] = 3
    monkeypatch.setattr(_kernel, "hash", "another")
    launch(X, 5, 2.0, BLOCK=16)
    assert len(launch.compiled) == before + 2


@pytest.mark.parametrize("value", [(1, 2), [3], SimpleNamespace(), 2 + 0j])
def test_an_argument_of_another_kind_goes_tritons_way(launch, value):
    launch(X, value, 2.0, BLOCK=16)
    launch(X, value, 2.0, BLOCK=16)
    launch(X, 5, 2.0, BLOCK=[16])
    launch(X, 5, 2.0, BLOCK=[16])
    assert len(launch.compiled) == 4


def test_one_kind_is_one_specialisation_of_triton():
    numbers = [0, 1, -1, 2, 15, 16, -16, 48, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 16]
    numbers += [2**32, 2**63 - 1, 2**63 - 16, -(2**63), 2**63, 2**64 - 16, 2**64 - 1]
    storage = torch.zeros(64, dtype=torch.uint8)
    tensors = [storage, storage[1:], storage[16:], storage[8:], storage[16:].view(torch.int32)]
    values = [*numbers, *tensors, 0.0, 1.0, -2.5, True, False, None]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(_kernel.signature, _kernel.params, backend)

    def special(value):
        return binder(storage, value, 1.0, BLOCK=16)[1]

    for one, two in itertools.combinations(values, 2):
        if relaunch._kind(one) == relaunch._kind(two):
            assert special(one) == special(two), (one, two)
    # And sizes and steps, which change from call to call, are not told apart in vain.
    assert relaunch._kind(4096) == relaunch._kind(32) and relaunch._kind(7) == relaunch._kind(9)
