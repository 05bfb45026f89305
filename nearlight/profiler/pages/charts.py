"""The page's pictures as inline SVG: a roofline and the memory by owner, texts on hover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

from nearlight.core.hardware import Gpu
from nearlight.core.report import OpRow, State, gib
from nearlight.profiler.memory import OWNERS
from nearlight.profiler.pages.terminal import merged

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 20, 48
# Flops per byte shown; a call without arithmetic stands at the left edge.
INTENSITY = (0.05, 20_000.0)
POINTS = 40


def roofline(before: State, after: State | None, gpu: Gpu, pipe: str) -> str:
    """Draw achieved rate against intensity; each dot is an op, its area is its time.

    A dot's height is the call's share of its own limit times the roof above it, so a dot on the
    roof runs at the speed of light whatever pipe it uses.
    """
    peak = gpu.peak_tflops(pipe)
    lowest = INTENSITY[0] * gpu.memory_gbps / 1e3 / 30
    axes = _Axes(INTENSITY, (lowest, peak * 2))
    ridge = peak * 1e3 / gpu.memory_gbps
    roof = [(INTENSITY[0], _roof(INTENSITY[0], gpu, peak)), (ridge, peak), (INTENSITY[1], peak)]
    parts = [
        axes.draw("flops per byte", "TFLOP/s"),
        f'<polyline class="roof" points="{axes.points(roof)}"/>',
        axes.text(ridge * 2, peak * 1.25, f"{peak:.0f} TFLOP/s dense {pipe}"),
        # Beside the middle of the slope, where no op of a model stands.
        axes.text(12.0, _roof(5.0, gpu, peak), f"{gpu.memory_gbps / 1e3:.2f} TB/s"),
    ]
    longest = max((row.time_ms for row in merged(before.ops)), default=1.0)
    for name, state in (("before", before), ("after", after)):
        if state is not None:
            parts += [
                _dot(name, row, axes, gpu, peak, longest) for row in merged(state.ops)[:POINTS]
            ]
    return _svg("".join(parts), HEIGHT, "Roofline of the step's ops before and after")


def _roof(intensity: float, gpu: Gpu, peak: float) -> float:
    return min(peak, intensity * gpu.memory_gbps / 1e3)


def _dot(name: str, row: OpRow, axes: _Axes, gpu: Gpu, peak: float, longest: float) -> str:
    # A call whose data fits in L2 has a share of its arithmetic alone, which says nothing here.
    if row.share is None or row.share <= 0 or row.bound == "L2":
        return ""
    intensity = row.flops / row.bytes if row.bytes else INTENSITY[1]
    intensity = min(max(intensity, INTENSITY[0]), INTENSITY[1])
    rate = max(row.share * _roof(intensity, gpu, peak), axes.y_range[0])
    x, y = axes.place(intensity, rate)
    radius = 3 + 15 * (row.time_ms / longest) ** 0.5
    text = (
        f"{row.name} in {row.module or 'the step'} ({name}): {row.calls} calls, "
        f"{row.time_ms:.2f} ms, {row.share:.0%} of its limit, {row.bound}"
    )
    return (
        f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
        f"<title>{escape(text)}</title></circle>"
    )


class _Axes:
    """Two logarithmic axes."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the picture's coordinates of a point."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        right = log10(x / x0) / log10(x1 / x0)
        up = log10(y / y0) / log10(y1 / y0)
        return (
            LEFT + right * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    def points(self, values: Sequence[tuple[float, float]]) -> str:
        """Return points as SVG wants them."""
        return " ".join("{:.1f},{:.1f}".format(*self.place(x, y)) for x, y in values)

    def text(self, x: float, y: float, words: str) -> str:
        """Write at a point."""
        px, py = self.place(x, min(y, self.y_range[1]))
        return f'<text x="{px:.1f}" y="{max(py, 14):.1f}">{escape(words)}</text>'

    def draw(self, x_title: str, y_title: str) -> str:
        """Draw grid lines at the powers of ten, their labels and the titles."""
        parts = []
        for value in _tens(*self.x_range):
            x, _ = self.place(value, self.y_range[0])
            parts.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"/><text class="tick" text-anchor="middle" '
                f'x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{value:g}</text>'
            )
        for value in _tens(*self.y_range):
            _, y = self.place(self.x_range[0], value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="tick" text-anchor="end" x="{LEFT - 6}" '
                f'y="{y + 4:.1f}">{value:g}</text>'
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{middle}" y="{HEIGHT - 8}">{x_title}'
            f'</text><text class="tick" text-anchor="middle" transform="translate(14 '
            f'{(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)">{y_title}</text>'
        )
        return "".join(parts)


def _tens(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(floor(log10(low)) + 1, floor(log10(high)) + 1)]


def memory(before: State, after: State | None, gpu: Gpu) -> str:
    """Draw peak memory by owner as stacked bars, with the GPU's size where it is near."""
    states = {"before": before, **({"after": after} if after else {})}
    bar, gap, top = 44, 34, 24
    most = max(max(sum(state.memory.values()) for state in states.values()), 1)
    shows_gpu = most > 0.4 * gpu.memory_bytes
    scale = (WIDTH - LEFT - RIGHT) / (max(most, gpu.memory_bytes) if shows_gpu else most)
    height = top + len(states) * (bar + gap)
    parts = []
    for index, (name, state) in enumerate(states.items()):
        y = top + index * (bar + gap)
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y + 27}">{name}</text>'
        )
        parts.append(_stack(name, state.memory, y, bar, scale))
    if shows_gpu:
        x = LEFT + gpu.memory_bytes * scale
        parts.append(
            f'<line class="size" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height - 16}"/>'
            f'<text text-anchor="end" x="{x:.1f}" y="12">{gpu.name}: {gib(gpu.memory_bytes)}</text>'
        )
    return _svg("".join(parts), height, "Peak memory by owner before and after")


def _stack(name: str, owners: Mapping[str, int], y: int, bar: int, scale: float) -> str:
    parts, x = [], float(LEFT)
    for owner in (*OWNERS, *(owner for owner in owners if owner not in OWNERS)):
        width = owners.get(owner, 0) * scale
        if width <= 0:
            continue
        text = f"{owner} ({name}): {gib(owners[owner])}"
        parts.append(
            f'<rect class="owner-{owner}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{bar}"><title>{escape(text)}</title></rect>'
        )
        x += width
    total = gib(sum(owners.values()))
    anchor, place = ("end", x) if x > WIDTH - 110 else ("start", x + 8)
    line = y + bar + 16 if anchor == "end" else y + 27
    parts.append(f'<text text-anchor="{anchor}" x="{place:.1f}" y="{line}">{total}</text>')
    return "".join(parts)


def _svg(inside: str, height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{inside}</svg>'
