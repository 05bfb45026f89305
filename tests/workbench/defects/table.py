"""The planted defects: where each lies, which property must name it, and by which words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Defect:
    """One op with one fault; the sound twin is the `OP` of the same file.

    Attributes:
        fault: what is wrong.
        file: a file of this folder.
        record: name of the op's record in it.
        property: the property that must fail.
        words: what its reason must say.
        needs_gpu: whether only a GPU shows it; else it is found without one.
        num_gpus: how many it takes.
        blind: whether somebody planted such a fault without having read `check`; only the two that
            were missed then are described, so that the others are new ones of those ops.
    """

    fault: str
    file: str
    record: str
    property: str
    words: str
    needs_gpu: bool = False
    num_gpus: int = 1
    blind: bool = False

    @property
    def language(self) -> str:
        """What its kernels are written in."""
        return "CUDA C++" if (FOLDER / self.file).with_suffix(".cu").exists() else "Triton"

    @property
    def target(self) -> str:
        """What `check` takes to find it."""
        return f"{FOLDER / self.file}:{self.record}"

    @property
    def sound(self) -> str:
        """What `check` takes to find its sound twin."""
        return f"{FOLDER / self.file}:OP"


_TRITON = (
    ("missing tail mask", "NO_TAIL_MASK", "poison", "past the end"),
    ("int32 offset", "INT32_OFFSET", "size", "32-bit"),
    ("unwritten row", "UNWRITTEN_ROW", "poison", "never written"),
    ("unwritten gradient", "UNWRITTEN_GRADIENT", "poison", "of the gradient of x were never"),
    ("out-of-bounds write of one element", "ONE_PAST_THE_END", "poison", "wrote right past"),
    ("read of uninitialised memory", "READS_UNINITIALISED", "poison", "before it was written"),
    ("wrong fake stride", "WRONG_FAKE_STRIDE", "torch", "wrong fake stride"),
    ("wrong fake dtype", "WRONG_FAKE_DTYPE", "torch", "wrong fake dtype"),
    ("missing fake", "MISSING_FAKE", "torch", "no fake"),
    ("undeclared mutation", "UNDECLARED_MUTATION", "torch", "undeclared mutation"),
    ("backward wrong by a factor", "WRONG_FACTOR", "values", "1.01 times what is right"),
    (
        "backward that ignores the upstream gradient",
        "IGNORES_UPSTREAM",
        "values",
        "does not depend on the upstream gradient",
    ),
    (
        "right only for contiguous upstream",
        "CONTIGUOUS_UPSTREAM",
        "layouts",
        "upstream transposed: gradient of x",
    ),
    ("accumulation in bf16", "SUMS_IN_BF16", "values", "kept in bfloat16"),
    ("input changed in place", "INPUT_IN_PLACE", "lifecycle", "x was changed"),
    (
        "upstream gradient overwritten",
        "UPSTREAM_OVERWRITTEN",
        "lifecycle",
        "the backward changed the upstream gradient",
    ),
    (
        "second backward silently wrong",
        "SECOND_BACKWARD",
        "lifecycle",
        "second backward gives another gradient of x, silently",
    ),
    (
        "inputs kept out of autograd's sight",
        "KEPT_OUT_OF_SIGHT",
        "lifecycle",
        "overwritten before the backward",
    ),
    (
        "result that depends on the run",
        "TILE_DRAWN_ANEW",
        "lifecycle",
        "differs between two calls on equal inputs",
    ),
    ("sum by float atomics", "FLOAT_ATOMICS", "determinism", "float atomics"),
    (
        "cached result for equal pointers",
        "CACHED_BY_POINTER",
        "lifecycle",
        "does not follow new values written in place",
    ),
    ("work skipped when timed", "WORK_SKIPPED", "lifecycle", "the 12th call on the same memory"),
)
_CUDA = (
    ("race on shared memory", "RACE", "sanitizer", "racecheck"),
    ("missing barrier", "MISSING_BARRIER", "sanitizer", "racecheck"),
    ("read of uninitialised memory", "READS_UNINITIALISED", "sanitizer", "initcheck"),
    ("out-of-bounds write of one element", "ONE_PAST_THE_END", "poison", "past the end"),
    ("unwritten column", "UNWRITTEN_COLUMN", "poison", "never written"),
    ("right only for contiguous input", "ASSUMES_CONTIGUOUS", "layouts", "x transposed: output"),
    ("backward wrong by a factor", "WRONG_FACTOR", "values", "1.01 times what is right"),
    ("wrong stream", "WRONG_STREAM", "torch", "stream: "),
)
_BLIND = (
    (
        "softmax of a row with no key",
        "softmax.py",
        "EVEN_WITHOUT_A_KEY",
        "extremes",
        "output: ",
    ),
    ("softmax without its maximum", "softmax.py", "NO_MAXIMUM", "values", "output: "),
    ("columns past the end in the sum", "softmax.py", "TAIL_IN_THE_SUM", "values", "output: "),
    ("gradient without its sum", "softmax.py", "WITHOUT_ITS_SUM", "values", "gradient of x: "),
    ("mask taken as contiguous", "softmax.py", "MASK_CONTIGUOUS", "layouts", "mask transposed: "),
    ("epsilon outside the root", "norm.py", "EPSILON_OUTSIDE", "extremes", "gradient of x: "),
    ("mean over the whole tile", "norm.py", "MEAN_OF_THE_TILE", "values", "output: "),
    ("root held constant", "norm.py", "ROOT_CONSTANT", "values", "gradient of x: "),
    ("weights of eight rows alone", "norm.py", "EIGHT_ROWS", "values", "gradient of weight: "),
    ("empty rows that raise", "norm.py", "NO_COLUMNS", "extremes", "ZeroDivisionError"),
)
DEFECTS = (
    *(Defect(*blind, blind=True) for blind in _BLIND),
    *(Defect(fault, "scale.py", *rest) for fault, *rest in _TRITON),
    Defect("returned alias", "pack.py", "RETURNED_ALIAS", "torch", "returns an alias"),
    Defect("NaN from a fully masked row", "softmax.py", "MASKED_ROW", "extremes", "not finite"),
    Defect("int32 offset", "center.py", "INT32_OFFSET", "size", "32-bit"),
    Defect(
        "graph replay that ignores new values",
        "scale.py",
        "REPLAY_IGNORES",
        "torch",
        "graph: ",
        needs_gpu=True,
    ),
    *(Defect(fault, "center.py", *rest, needs_gpu=True) for fault, *rest in _CUDA),
    Defect(
        "device 1 while device 0 is current",
        "center.py",
        "CURRENT_DEVICE",
        "torch",
        "device 1 while 0 is current",
        needs_gpu=True,
        num_gpus=2,
    ),
)
