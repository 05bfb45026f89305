"""Turn one profiled step's events into device time by op and module; pure, needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nearlight.profiler.lowering import plain_name

# Ranges that `module_ranges` opens around every module's forward.
MODULE_RANGE = "nearlight module: "
_NODE = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer.step#"


@dataclass(frozen=True)
class KernelTimes:
    """Device time of a step.

    Attributes:
        time_us: by (op, module, phase), the phase as `capture.Phase`.
        num_kernels: kernels that were given to an op.
        total_us: device time of all kernels of the step.
        attributed_share: time with a named module over all kernel time.
        num_on_device: kernels that ran.
    """

    time_us: dict[tuple[str, str, str], float] = field(default_factory=dict)
    num_kernels: int = 0
    total_us: float = 0.0
    attributed_share: float = 0.0
    num_on_device: int = 0

    @property
    def unattributed_us(self) -> float:
        """Kernel time that no op claims."""
        return max(self.total_us - sum(self.time_us.values()), 0.0)


def same_op(name: str) -> str:
    """Return one name for an op and its in-place variant; they do the same work.

    Autograd sums gradients in place, but out of place while a dispatch mode records them.
    """
    return name.removesuffix("_")


def kernel_times(events: Iterable[Any], known_ops: Collection[str]) -> KernelTimes:
    """Attribute kernels to ops and modules, backward ones through their forward op.

    Args:
        events: `torch.profiler.profile(...).events()`: of each CPU event `name`, `kernels`
            (with `name` and `duration` in µs), `cpu_parent` and `sequence_nr` are read.
        known_ops: names of ops as a trace has them; a kernel goes to the outermost op of its
            stack that is known, so that "aten::copy_" inside "aten::_to_copy" is the cast.
            In-place variants of known ops are known.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    on_host = [event for event in events if not _is_on_device(event)]
    modules = _modules_by_sequence(on_host)
    known = {same_op(name) for name in known_ops}
    # A range of the program ("Optimizer.step#AdamW.step") is shown on the device as well.
    ranges = {event.name for event in events if getattr(event, "is_user_annotation", False)}
    ran = [
        (event.name, event.time_range.elapsed_us())
        for event in events
        if _is_on_device(event) and not _is_range(event.name, ranges)
    ]
    unclaimed = Counter(ran)
    time_us: dict[tuple[str, str, str], float] = {}
    # Torch finds an event's kernels by its number, but calls of the CUDA runtime and notes of the
    # profiler ("Command Buffer Full") have numbers of another series: where the two meet, they
    # show the kernels of some op once more. So a kernel is given away once, and to an op first.
    for event in sorted(on_host, key=lambda event: "::" not in event.name):
        for kernel in event.kernels:
            if unclaimed[kernel.name, kernel.duration]:
                unclaimed[kernel.name, kernel.duration] -= 1
                key = (_op_name(event, known), _module(event, modules), _phase(event))
                time_us[key] = time_us.get(key, 0.0) + kernel.duration
    total_us = sum(duration for _, duration in ran)
    num_kernels = len(ran) - unclaimed.total()
    named = sum(us for (_, module, _), us in time_us.items() if module)
    share = named / total_us if total_us else 0.0
    return KernelTimes(time_us, num_kernels, total_us, share, len(ran))


def _is_on_device(event: Any) -> bool:
    return bool(event.device_type.name != "CPU")


def _is_range(name: str, ranges: Collection[str]) -> bool:
    """Return whether a "kernel" is the shadow that a range casts on the device's timeline."""
    return name in ranges or name.startswith((MODULE_RANGE, _UPDATE))


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _modules_by_sequence(events: list[Any]) -> dict[int, str]:
    """Return the module of each forward op by its autograd sequence number."""
    modules: dict[int, str] = {}
    for event in events:
        if event.sequence_nr < 0 or any(e.name.startswith(_NODE) for e in _ancestors(event)):
            continue
        module = _range(event)
        if module:
            # Ops without a node carry the number of the next node; the last event made it.
            modules[event.sequence_nr] = module
    return modules


def _range(event: Any) -> str:
    names = (ancestor.name for ancestor in _ancestors(event))
    found = next((name for name in names if name.startswith(MODULE_RANGE)), "")
    return found.removeprefix(MODULE_RANGE)


def _module(event: Any, modules: dict[int, str]) -> str:
    for ancestor in _ancestors(event):
        if ancestor.name.startswith(MODULE_RANGE):
            return ancestor.name.removeprefix(MODULE_RANGE)
        if ancestor.name.startswith(_NODE):
            return modules.get(ancestor.sequence_nr, "")
    return ""


def _phase(event: Any) -> str:
    names = [ancestor.name for ancestor in _ancestors(event)]
    if any(name.startswith(_NODE) for name in names):
        return "backward"
    return "optimizer" if any(name.startswith(_UPDATE) for name in names) else "forward"


def _op_name(event: Any, known: Collection[str]) -> str:
    names = [plain_name(ancestor.name) for ancestor in _ancestors(event)]
    found = [name for name in names if same_op(name) in known]
    return found[-1] if found else names[0]
