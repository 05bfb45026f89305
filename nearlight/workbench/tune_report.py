"""What `tune` answers: what the search of each launch came to, its row, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from nearlight.core import timing, tuned
from nearlight.core.hardware import Gpu
from nearlight.core.op import Case, Op
from nearlight.core.report import Proof, Report
from nearlight.core.timing import Timing
from nearlight.core.tuned import Asked

# So many of the best are measured again, beside the rule's.
NUM_BEST = 5
# A rule serves shapes that have no row: it must come this close to the best launch found.
MAX_RULE_LOSS = 0.05
WRONG = "wrong: "


@dataclass(frozen=True)
class Found:
    """What the search of one launch came to.

    Attributes:
        asked: the choice and its arguments.
        case: where it was asked.
        direction: what was timed, "forward" or "forward_backward".
        rule: the rule's configuration.
        timings: of the best and the rule's, measured beside each other, fastest first.
        dropped: configurations that were not timed, with the reason.
        num_timed: configurations that were.
        fault: why nothing can be kept of it, or "".
    """

    asked: Asked
    case: Case
    direction: str
    rule: Any
    timings: Mapping[Any, Timing] = field(default_factory=dict)
    dropped: Mapping[Any, str] = field(default_factory=dict)
    num_timed: int = 0
    fault: str = ""

    @property
    def fastest(self) -> Any:
        """The configuration of the smallest median."""
        return next(iter(self.timings))

    @cached_property
    def rule_loss(self) -> float:
        """How much longer the rule's configuration takes than the one kept.

        0 where nothing beats the rule beyond the spread of the two.
        """
        faster, ratio = timing.difference(self.timings[self.fastest], self.timings[self.rule])
        return 1 / ratio - 1 if faster == "faster" else 0.0

    @property
    def rule_is_best(self) -> bool:
        """Whether the rule's configuration is the one kept."""
        return self.rule_loss == 0

    @property
    def kept(self) -> Any:
        """The configuration to launch from now on."""
        return self.rule if self.rule_is_best else self.fastest

    @property
    def passed(self) -> bool:
        """Whether the rule is right and close enough to the best."""
        return not self.fault and self.rule_loss <= MAX_RULE_LOSS

    def saved(self) -> tuned.Row:
        """Return the row for `nearlight.core.tuned`, without GPU and versions."""
        own = self.timings[self.kept]
        row: tuned.Row = {
            "key": self.asked.key,
            "case": self.case.name,
            "direction": self.direction,
        }
        row |= {"config": asdict(self.kept), "time_us": own.median_us}
        row |= {"low_us": own.low_us, "high_us": own.high_us, "method": own.method}
        row |= {"rule_is_best": self.rule_is_best, "rule": asdict(self.rule)}
        row |= {"rule_us": self.timings[self.rule].median_us, "rule_loss": self.rule_loss}
        for other in [config for config in self.timings if config != self.kept][:1]:
            row |= {"next_best": asdict(other), "next_us": self.timings[other].median_us}
        dropped = {text(config): why for config, why in self.dropped.items()}
        return row | {"num_timed": self.num_timed, "dropped": dropped}

    def drawn(self) -> dict[str, Any]:
        """Return the row of the report; why something was dropped stands in the file."""
        row: dict[str, Any] = {"launch": self.asked.key, "direction": self.direction}
        if self.timings and not self.fault:
            saved = self.saved()
            names = ("time_us", "low_us", "high_us", "rule_us", "rule_loss", "next_us")
            row |= {"config": text(self.kept), **{name: saved.get(name) for name in names}}
            row["timed"] = self.num_timed
        remarks = [self.fault or ("" if self.passed else "the rule is too slow here")]
        remarks += [
            f"{text(config)} {why}"
            for config, why in self.dropped.items()
            if why.startswith(WRONG) and not self.fault
        ]
        return row | {"dropped": len(self.dropped), "remark": "; ".join(filter(None, remarks))}


def text(config: Any) -> str:
    """Return a configuration as text ("block_m=1 num_warps=4")."""
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())


def report_of(op: Op, gpu: Gpu, found: Sequence[Found], measured_on: Mapping[str, str]) -> Report:
    """Return the report of a search; a rule too far from the best fails its proof."""
    faults = [each for each in found if each.fault]
    sound = [each for each in found if not each.fault]
    far = [each for each in sound if not each.passed]
    worst = max(sound, key=lambda each: each.rule_loss, default=None)
    best = sum(each.rule_is_best for each in sound)
    answer = f"{op.name} on {gpu.name}: {len(found)} launches, the rule is best in {best}"
    if worst is not None and worst.rule_loss > 0:
        answer += f" and at most {worst.rule_loss:.1%} slower than the best"
    if faults:
        answer += f"; {len(faults)} without a row: {faults[0].fault}"
    return Report(
        verb="tune",
        answer=answer,
        target=op.name,
        gpu=gpu.key,
        setup="candidates checked, then timed interleaved (inputs rotated, caches flushed), "
        f"the best {NUM_BEST} again; rule loss = how much longer the rule's launch takes",
        versions=measured_on,
        rows=[each.drawn() for each in found],
        proof=Proof(
            not faults and not far,
            [],
            f"every rule within {MAX_RULE_LOSS:.0%} of the best launch found",
        ),
        next=f"next: nearlight bench {op.name}",
    )
