from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nearlight.profiler.kernel_events import MODULE_RANGE, kernel_times, same_op

NODE = "autograd::engine::evaluate_function: "
KNOWN = {"aten::mm", "aten::_to_copy", "aten::copy_", "aten::scaled_dot_product_attention_backward"}


@dataclass
class Event:
    """The part of torch.autograd.profiler_util.FunctionEvent that is read."""

    name: str
    start: float = 0.0
    cpu_parent: Any = None
    sequence_nr: int = -1
    durations: tuple[float, ...] = ()
    device: str = "CPU"
    is_user_annotation: bool = False
    kernels: list[Any] = field(init=False)
    time_range: Any = field(init=False)
    device_type: Any = field(init=False)

    def __post_init__(self):
        self.kernels = [SimpleNamespace(name="kernel", duration=d) for d in self.durations]
        self.device_type = SimpleNamespace(name=self.device)
        self.time_range = SimpleNamespace(start=self.start, elapsed_us=lambda: sum(self.durations))


def attributed(events, known=KNOWN):
    """Attribute the kernels that events show, each of which ran on the device once."""
    shown = [kernel for event in events for kernel in event.kernels]
    ran = [Event(kernel.name, durations=(kernel.duration,), device="CUDA") for kernel in shown]
    return kernel_times([*events, *ran], known)


def module(name, parent=None):
    return Event(MODULE_RANGE + name, cpu_parent=parent)


def test_forward_kernels_go_to_the_innermost_module():
    outer = module("layers.0")
    inner = module("layers.0.q_proj", outer)
    linear = Event("aten::linear", cpu_parent=inner, sequence_nr=7)
    times = attributed([outer, inner, linear, Event("aten::mm", 1, linear, 8, (3.0, 2.0))])
    assert times.time_us == {("aten::mm", "layers.0.q_proj", "forward"): 5.0}
    assert (times.num_kernels, times.attributed_share) == (2, 1.0)


def test_backward_kernels_go_to_the_module_of_their_forward_op():
    part = module("layers.0.q_proj")
    node = Event(NODE + "MmBackward0", 10, sequence_nr=8)
    inner = Event("MmBackward0", 11, node, 8)
    times = attributed(
        [
            part,
            Event("aten::mm", 1, part, 8),
            node,
            inner,
            Event("aten::mm", 12, inner, 99, (4.0,)),
        ],
    )
    assert times.time_us == {("aten::mm", "layers.0.q_proj", "backward"): 4.0}


def test_the_op_that_made_the_node_wins_over_those_before_it():
    first, second = module("a"), module("b")
    node = Event(NODE + "MmBackward0", 10, sequence_nr=8)
    events = [
        Event("aten::mm", 2, second, 8),
        Event("aten::arange", 1, first, 8),  # has no node and shows the next number
        node,
        Event("aten::mm", 11, node, 8, (1.0,)),
    ]
    assert list(attributed(events).time_us) == [("aten::mm", "b", "backward")]


def test_a_kernel_belongs_to_the_outermost_known_op():
    to = Event("aten::to")
    cast = Event("aten::_to_copy", cpu_parent=to)
    times = attributed([to, cast, Event("aten::copy_", 1, cast, -1, (2.0,))])
    assert list(times.time_us) == [("aten::_to_copy", "", "forward")]
    times = attributed([Event("aten::copy_", 1, None, -1, (2.0,))])
    assert list(times.time_us) == [("aten::copy_", "", "forward")]
    times = attributed([Event("somebody::op", 1, None, -1, (2.0,))])
    assert list(times.time_us) == [("somebody::op", "", "forward")]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_goes_by_its_plain_name(kind):
    event = Event(f"aten::_scaled_dot_product_{kind}_attention_backward", durations=(1.0,))
    times = attributed([event])
    assert list(times.time_us) == [("aten::scaled_dot_product_attention_backward", "", "forward")]


def test_time_that_no_op_claims_and_time_without_a_module():
    part = module("m")
    events = [
        part,
        Event("aten::mm", 1, part, 1, (6.0,)),
        Event("aten::mm", 2, None, -1, (2.0,)),
        Event("kernel", 3, durations=(6.0,), device="CUDA"),
        Event("kernel", 4, durations=(2.0,), device="CUDA"),
        Event("lone kernel", 5, durations=(2.0,), device="CUDA"),
    ]
    times = kernel_times(events, KNOWN)
    assert times.total_us == 10.0
    assert times.unattributed_us == 2.0
    assert times.attributed_share == 0.6


def test_ranges_shown_on_the_device_are_no_kernels():
    part = module("m")
    part.kernels = [SimpleNamespace(name=part.name, duration=100.0)]
    step = Event("Optimizer.step")
    step.kernels = [SimpleNamespace(name=step.name, duration=100.0)]
    events = [
        part,
        step,
        Event(part.name, 1, durations=(100.0,), device="CUDA"),
        Event(step.name, 2, durations=(100.0,), device="CUDA", is_user_annotation=True),
        Event("aten::mm", 3, part, 1, (6.0,)),
        Event("kernel", 4, durations=(6.0,), device="CUDA"),
    ]
    times = kernel_times(events, KNOWN)
    assert times.time_us == {("aten::mm", "m", "forward"): 6.0}
    assert times.total_us == 6.0


def test_a_range_of_the_program_is_no_kernel_whatever_event_shows_it():
    """The optimizer's own range reached from its start on the host to its last kernel."""
    name = "Optimizer.step#AdamW.step"
    update = Event(name, is_user_annotation=True)
    mine = Event("my region", is_user_annotation=True)
    adamw = Event("aten::_fused_adamw_", 1, update, -1, (8.6,))
    adamw.kernels += [SimpleNamespace(name=name, duration=183.8)]
    adamw.kernels += [SimpleNamespace(name="my region", duration=500.0)]
    events = [
        update,
        mine,
        adamw,
        Event("my region", 2, durations=(500.0,), device="CUDA"),
        Event(name, 2, durations=(183.8,), device="CUDA"),
        Event("kernel", 3, durations=(8.6,), device="CUDA"),
    ]
    times = kernel_times(events, {"aten::_fused_adamw_"})
    assert times.time_us == {("aten::_fused_adamw_", "", "optimizer"): 8.6}
    assert times.total_us == 8.6


def test_an_in_place_variant_of_a_known_op_is_known():
    outer = Event("aten::index_put_")
    inner = Event("aten::_index_put_impl_", 1, outer, -1, (2.0,))
    times = attributed([outer, inner], {"aten::index_put"})
    assert list(times.time_us) == [("aten::index_put_", "", "forward")]
    assert same_op("aten::add_") == same_op("aten::add") == "aten::add"


def test_nothing_in_nothing_out():
    times = kernel_times([], KNOWN)
    assert (times.time_us, times.total_us, times.attributed_share) == ({}, 0.0, 0.0)


@pytest.mark.parametrize("note", ["cudaLaunchKernel", "Command Buffer Full"])
def test_a_note_of_the_profiler_with_the_number_of_an_op_claims_nothing(note):
    """Torch numbers both from 1, and shows the kernels of one at the other."""
    update = Event("aten::_fused_adamw_", 0)
    shown = Event(note, 1, update, durations=(3.0, 4.0))
    op = Event("aten::mm", 2, durations=(3.0, 4.0))
    ran = [Event("kernel", 3, durations=(us,), device="CUDA") for us in (4.0, 3.0)]
    times = kernel_times([update, shown, op, *ran], {"aten::mm", "aten::_fused_adamw_"})
    assert times.time_us == {("aten::mm", "", "forward"): 7.0}
    assert (times.num_kernels, times.num_on_device, times.total_us) == (2, 2, 7.0)


def test_a_kernel_of_the_users_own_function_belongs_to_it():
    own = Event("MyFunctionBackward", durations=(3.0,))
    assert attributed([own]).time_us == {("MyFunctionBackward", "", "forward"): 3.0}
