"""What a GPU was measured to reach, by pattern and size, and the time of a call that follows."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from nearlight.core.errors import BadInput
from nearlight.core.hardware import GPUS, Gpu

if TYPE_CHECKING:
    from nearlight.core.cost import Attention, Cost

SCHEMA = 1
# The GPU whose fractions stand in for those of GPUs never measured.
MEASURED_GPU = "h200"
# The time of a whole step may be off by this much on a GPU that was measured: the steps predicted
# so far were off by at most 9.5%, single ops by up to 35% (docs/results.md).
VALIDATED_ERROR = 0.15
# The same on a GPU never measured. A convention, not a measurement: no second GPU was measured yet.
CARRIED_ERROR = 0.40


@dataclass(frozen=True)
class Point:
    """One measurement of a curve: the size it was taken at and the rate reached."""

    size: float
    rate: float


@dataclass(frozen=True)
class AttentionPoint:
    """One attention measurement; the flops of a causal call count half."""

    head_dim: int
    is_causal: bool
    is_backward: bool
    seq_len: int
    tflops: float


@dataclass(frozen=True)
class Ceilings:
    """What a GPU was measured to reach.

    All rates are taken with `kernel_floor_us` off the measured time, so that a predicted time is
    limit ÷ fraction + floor and small calls do not pay the floor twice.

    The file `results/<gpu>/calibrate.json` holds exactly the JSON form (`to_dict`)::

        {"schema": 1, "gpu": "h200", "source": "how, one line",
         "versions": {"device": "NVIDIA H200", "driver": "...", "torch": "...", "triton": "...",
                      "date": "2026-11-30", "commit": "..."},
         "kernel_floor_us": 4.4,
         "host_us": {"torch_op": 12.2, "triton_launch": 19.2, ...},
         "stream": [{"size": BYTES READ PLUS WRITTEN, "rate": GB PER SECOND}, ...],
         "matmul": {"bf16": [{"size": FLOPS, "rate": TFLOP PER SECOND}, ...], ...},
         "attention": [{"head_dim": 64, "is_causal": true, "is_backward": false, "seq_len": 2048,
                        "tflops": 398.0}, ...]}

    Attributes:
        gpu: key of the GPU table.
        source: how the numbers were measured, or carried over.
        versions: device, driver, torch, triton, date of the measurement.
        kernel_floor_us: device time of a kernel that does nothing.
        host_us: CPU time per call by kind of call; "torch_op" is an eager torch op.
        stream: 10⁹ bytes per second by bytes moved.
        matmul: by pipe, 10¹² operations per second by operations of the product.
        attention: rates of the attention that torch chooses on this GPU.
        validated: whether measured on this GPU.
    """

    gpu: str
    source: str
    versions: Mapping[str, str] = field(hash=False)
    kernel_floor_us: float
    host_us: Mapping[str, float] = field(hash=False)
    stream: Sequence[Point]
    matmul: Mapping[str, Sequence[Point]] = field(hash=False)
    attention: Sequence[AttentionPoint]
    validated: bool = True

    @property
    def kind(self) -> Literal["measured", "predicted"]:
        """Whether the ceilings were measured on this GPU."""
        return "measured" if self.validated else "predicted"

    @property
    def host_us_per_op(self) -> float:
        """CPU time of an eager torch op."""
        return self.host_us["torch_op"]

    @property
    def low_factor(self) -> float:
        """A step's predicted time × this is the lower end of its interval."""
        return 1 - (VALIDATED_ERROR if self.validated else CARRIED_ERROR)

    @property
    def high_factor(self) -> float:
        """A step's predicted time × this is the upper end of its interval."""
        return 1 + (VALIDATED_ERROR if self.validated else CARRIED_ERROR)

    def stream_gbps(self, num_bytes: float) -> float:
        """Return the bandwidth reached when a call moves `num_bytes`."""
        return _interpolate(self.stream, num_bytes)

    def matmul_tflops(self, pipe: str, flops: float) -> float:
        """Return the rate a matrix product of `flops` reaches on `pipe`.

        A pipe that was never measured gets bf16's share of its peak (fp16's without bf16).
        """
        if pipe in self.matmul:
            return _interpolate(self.matmul[pipe], flops)
        gpu = GPUS[self.gpu]
        known = "bf16" if "bf16" in self.matmul else "fp16"
        share = _interpolate(self.matmul[known], flops) / gpu.peak_tflops(known)
        return share * gpu.peak_tflops(pipe)

    def attention_tflops(self, attention: Attention | None) -> float:
        """Return the rate of an attention call: the nearest head width, its curve by length."""
        if attention is None:
            return median(point.tflops for point in self.attention)
        alike = [
            point
            for point in self.attention
            if (point.is_causal, point.is_backward) == (attention.is_causal, attention.is_backward)
        ]
        nearest = min(
            (point.head_dim for point in alike), key=lambda dim: abs(log(dim / attention.head_dim))
        )
        curve = [Point(p.seq_len, p.tflops) for p in alike if p.head_dim == nearest]
        return _interpolate(curve, attention.seq_len)

    def time_s(self, cost: Cost) -> float:
        """Return the time of a call at these ceilings, without any launch cost.

        Never below the call's limit.
        """
        gpu = GPUS[self.gpu]
        if cost.pattern == "attention":
            # The curve is of the half-precision pipe; another pipe keeps the share of its peak.
            half = "bf16" if "bf16" in gpu.peaks_tflops else "fp16"
            share = self.attention_tflops(cost.attention) / gpu.peak_tflops(half)
            rates = {pipe: share * gpu.peak_tflops(pipe) for pipe in cost.flops}
        else:
            rates = {pipe: self.matmul_tflops(pipe, flops) for pipe, flops in cost.flops.items()}
        times = [flops / (rates[pipe] * 1e12) for pipe, flops in cost.flops.items() if flops]
        if cost.bytes:
            times.append(cost.bytes / (self.stream_gbps(cost.bytes) * 1e9))
        return max([*times, cost.limit_s(gpu)])

    def predict_s(self, cost: Cost) -> float:
        """Return the predicted device time of a call: ceilings plus a floor per kernel."""
        return self.time_s(cost) + cost.num_kernels * self.kernel_floor_us * 1e-6

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as the class describes it."""
        values = asdict(self)
        del values["validated"]
        return {"schema": SCHEMA, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ceilings:
        """Build from the JSON form; raise ValueError where something is missing or senseless."""
        try:
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema is {values['schema']!r}, known is {SCHEMA}")
            made = cls(
                gpu=values["gpu"],
                source=values["source"],
                versions=dict(values["versions"]),
                kernel_floor_us=float(values["kernel_floor_us"]),
                host_us={name: float(us) for name, us in values["host_us"].items()},
                stream=_curve(values["stream"]),
                matmul={pipe: _curve(points) for pipe, points in values["matmul"].items()},
                attention=tuple(AttentionPoint(**point) for point in values["attention"]),
            )
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        _check(made)
        return made


def load(gpu: Gpu) -> Ceilings:
    """Return the ceilings of a GPU.

    The user's own calibration comes first, then the one that ships with nearlight, then the
    H200's fractions carried over (`validated` is False then).

    Raises:
        BadInput: a calibration file that cannot be used, with its path and what is wrong.
    """
    for path in (user_path(gpu.key), package_path(gpu.key)):
        if path.is_file():
            return _read_once(path, path.stat().st_mtime_ns, gpu)
    path = package_path(MEASURED_GPU)
    measured = _read_once(path, path.stat().st_mtime_ns, GPUS[MEASURED_GPU])
    return carry_over(measured, gpu)


@lru_cache(maxsize=8)
def _read_once(path: Path, changed_ns: int, gpu: Gpu) -> Ceilings:
    """Read a file again only when it has changed: predictions ask for ceilings op by op."""
    return read(path, gpu)


def read(path: Path, gpu: Gpu) -> Ceilings:
    """Read one calibration file of `gpu`; BadInput with the path where it cannot be used."""
    try:
        made = Ceilings.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise BadInput(
            f"{path}: {error}; run `nearlight calibrate` again or delete the file"
        ) from None
    if made.gpu != gpu.key:
        raise BadInput(
            f"{path}: holds the ceilings of {made.gpu}, not of {gpu.key}; delete the file"
        )
    return made


def carry_over(measured: Ceilings, gpu: Gpu) -> Ceilings:
    """Return ceilings for a GPU never measured: another's fractions of its own peaks."""
    origin = GPUS[measured.gpu]

    def scaled(points: Sequence[Point], factor: float) -> tuple[Point, ...]:
        return tuple(Point(point.size, point.rate * factor) for point in points)

    half = "bf16" if "bf16" in gpu.peaks_tflops else "fp16"
    matmul = {
        pipe: scaled(points, gpu.peak_tflops(pipe) / origin.peak_tflops(pipe))
        for pipe, points in measured.matmul.items()
        if pipe in gpu.peaks_tflops
    }
    if half not in matmul:
        factor = gpu.peak_tflops(half) / origin.peak_tflops("bf16")
        matmul[half] = scaled(measured.matmul["bf16"], factor)
    attention = gpu.peak_tflops(half) / origin.peak_tflops("bf16")
    return replace(
        measured,
        gpu=gpu.key,
        source=f"not validated: fractions measured on {origin.key} carried over to {gpu.key}",
        stream=scaled(measured.stream, gpu.memory_gbps / origin.memory_gbps),
        matmul=matmul,
        attention=tuple(replace(p, tflops=p.tflops * attention) for p in measured.attention),
        validated=False,
    )


def user_path(key: str) -> Path:
    """Return where `nearlight calibrate` writes the ceilings of a GPU for this user."""
    import platformdirs

    return Path(platformdirs.user_data_dir("nearlight")) / "results" / key / "calibrate.json"


def package_path(key: str) -> Path:
    """Return where the ceilings of a GPU lie inside the package."""
    return Path(__file__).parents[1] / "data" / "results" / key / "calibrate.json"


def _curve(points: Sequence[Mapping[str, float]]) -> tuple[Point, ...]:
    made = (Point(float(point["size"]), float(point["rate"])) for point in points)
    return tuple(sorted(made, key=lambda point: point.size))


def _check(made: Ceilings) -> None:
    if made.gpu not in GPUS:
        raise ValueError(f"gpu {made.gpu!r} is not in the table")
    if "torch_op" not in made.host_us:
        raise ValueError("host_us has no 'torch_op'")
    if not {"bf16", "fp16"} & made.matmul.keys():
        raise ValueError("matmul has neither 'bf16' nor 'fp16'")
    directions = {(point.is_causal, point.is_backward) for point in made.attention}
    if len(directions) < 4:
        raise ValueError("attention needs causal and full, forward and backward")
    curves = [made.stream, *made.matmul.values()]
    # Written so that NaN fails as well.
    if not all(curves) or not all(p.size > 0 and p.rate > 0 for curve in curves for p in curve):
        raise ValueError("every curve needs points of positive size and rate")
    numbers = [n for p in made.attention for n in (p.tflops, p.head_dim, p.seq_len)]
    if not all(number > 0 for number in (*numbers, made.kernel_floor_us, *made.host_us.values())):
        raise ValueError("attention, the kernel floor and host costs must be positive")


def _interpolate(curve: Sequence[Point], size: float) -> float:
    """Return the rate at `size`, linear in log(size); beyond the ends the end's rate."""
    ordered = sorted(curve, key=lambda point: point.size)
    at = bisect_left(ordered, size, key=lambda point: point.size)
    if at == 0:
        return ordered[0].rate
    if at == len(ordered):
        return ordered[-1].rate
    left, right = ordered[at - 1], ordered[at]
    weight = log(size / left.size) / log(right.size / left.size)
    return left.rate + weight * (right.rate - left.rate)
