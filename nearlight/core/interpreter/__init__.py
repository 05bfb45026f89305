"""Run a Triton kernel on CPU tensors, as a GPU would compute it, with nothing left patched.

Triton's own interpreter lends its builder and its way of replacing `tl`; what was wrong there is
repaired for the time of one launch and under one lock:

- `arithmetic`: every float format, rounded once; `reductions`: sums, scans and own combinations;
- `source`: the kernel's Python means what the compiler makes of it;
- `types`: shapes made once, for speed;
- `patches`: what is replaced, and put back; `launch`: arguments and the loop over programs.
"""

from nearlight.core.interpreter.launch import launch, lock
from nearlight.core.interpreter.types import builder

__all__ = ["builder", "launch", "lock"]
