"""The ops: one file or folder each, its public function of the same name, its record in `OPS`.

The imports are eager because a function and its module share a name: once a submodule has been
imported, only an assignment after it leaves the function under that name.
"""

from nearlight.core.op import Op
from nearlight.ops.layer_norm import OP as _LAYER_NORM
from nearlight.ops.layer_norm import layer_norm
from nearlight.ops.linear_cross_entropy import OP as _LINEAR_CROSS_ENTROPY
from nearlight.ops.linear_cross_entropy import linear_cross_entropy
from nearlight.ops.rms_norm import OP as _RMS_NORM
from nearlight.ops.rms_norm import rms_norm
from nearlight.ops.rope import OP as _ROPE
from nearlight.ops.rope import rope
from nearlight.ops.swiglu import OP as _SWIGLU
from nearlight.ops.swiglu import swiglu

OPS: dict[str, Op] = {
    op.name: op for op in (_LAYER_NORM, _LINEAR_CROSS_ENTROPY, _RMS_NORM, _ROPE, _SWIGLU)
}

__all__ = ["OPS", "layer_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu"]
