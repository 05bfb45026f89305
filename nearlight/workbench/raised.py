"""What an exception says about an op, in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from torch._ops import OpOverload

from nearlight.core.cuda_messages import errors_in
from nearlight.core.errors import said
from nearlight.core.op import Op
from nearlight.core.register import implementations
from nearlight.core.user_code import place_of
from nearlight.workbench.property import any_case, plural
from nearlight.workbench.trial import Trial, differentiable, make_inputs

# What torch says where an op's implementation returns something else than it declares.
_MISRETURNED = re.compile(
    r"Unable to cast Python instance of type <class '(?:\w+\.)*(\w+)'>|"
    r"Object of type '(\w+)' is not an instance of 'sequence'|Unable to cast (.).* to Tensor$",
    re.DOTALL,
)
_CALLED = {
    "NoneType": "None",
    "Tensor": "a tensor",
    "list": "a list of something else",
    "[": "a list",
    "(": "a tuple",
}
_DECLARED = {"Tensor": "a tensor", "List[Tensor]": "a list of tensors"}


def describe(error: BaseException, op: Op, device: str) -> str:
    """Return its type, the line of its message that tells, and the user's line that raised it."""
    if told := meant_by_torch(error, op, device):
        return f"{type(error).__name__}: {told}"
    message = said(error).strip()
    if not message:
        return f"{type(error).__name__}{at(error)}"
    lines = message.splitlines()
    told = next(iter(errors_in(message)), lines[0])
    if told.startswith("at ") and len(lines) > 1:  # Triton: a place in the kernel, its lines, why
        told = f"{lines[-1].strip()} ({told.rstrip(':')} of the kernel)"
    return f"{type(error).__name__}: {told}{at(error)}"


def at(error: BaseException) -> str:
    """Return " at " and the user's line that raised an error, or ""."""
    return f" at {place}" if (place := place_of(error)) else ""


def meant_by_torch(error: BaseException, op: Op, device: str) -> str:
    """Return what an error that torch raised says of the user's code, or ""."""
    return _wrong_return(error) or _wrong_number_of_gradients(error, op, device)


def _wrong_return(error: BaseException) -> str:
    """Say what an op's implementation returned, if it is not what the op declares."""
    told = _MISRETURNED.match(f"{error}")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The implementation itself is left already.
    overload = frames[-1].f_locals.get("self") if frames else None
    if told is None or not isinstance(overload, OpOverload):
        return ""
    implementation = implementations.get(overload._schema.name)
    if implementation is None:
        return ""
    name = getattr(implementation, "__name__", overload._schema.name)
    code = getattr(implementation, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    given = next(filter(None, told.groups()))
    types = [str(returned.type) for returned in overload._schema.returns]
    declared = _DECLARED.get(types[0], types[0]) if len(types) == 1 else f"{len(types)} results"
    says = "annotation" if "return" in getattr(implementation, "__annotations__", {}) else "schema"
    hint = ": is there a return?" if given == "NoneType" else ""
    return f"{name}{place} returned {_CALLED.get(given, given)}, its {says} says {declared}{hint}"


def _wrong_number_of_gradients(error: BaseException, op: Op, device: str) -> str:
    """Say how many gradients a backward has to return, if torch says that it returned others."""
    told = re.search(
        r"(\w+) returned an incorrect number of gradients \(.*?(\d+).*?(\d+)\)", f"{error}"
    )
    if not isinstance(error, RuntimeError) or told is None:
        return ""
    own = told[1].startswith("GeneratedBackwardFor_")  # torch adds one of its own
    needed, given = (int(number) - own for number in told.groups()[1:])
    names = differentiable(make_inputs(op, Trial(any_case(op)), device))
    return (
        f"the backward returned {plural(given, 'gradient')}, needed are {needed}: one for each "
        f"argument of its forward, in order, or None; {', '.join(names)} require one"
    )
