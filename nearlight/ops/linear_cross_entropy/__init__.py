"""Linear cross entropy: the output layer and its loss, without the logits.

    logits = logit_scale · (x · weightᵀ + bias), softcapped; loss = −log softmax(logits)[label]
    dlogits = (softmax(logits) − onehot(label)) · row weight
    dx = dlogits · weight        dweight = dlogitsᵀ · x        dbias = Σ dlogits

Legend: ... (or M) rows, H hidden width, V vocabulary.

Rows are taken in chunks (../_chunks.py). Per chunk cuBLAS computes the logits into one buffer, a
kernel turns them into losses and their own gradient in place (kernels.py), and two more products
give the chunk's share of the gradients (../_linear_logits.py). What the logits take is bounded by a
budget, and no product is done twice for a scalar loss.

Limits: no second derivative; fp16 and reduction="none" compute the logits twice; a backward with
retain_graph copies the gradients. Logits of ignored rows may be NaN, their x may not: in dweight
it is multiplied by 0.
"""

from nearlight.ops.linear_cross_entropy.function import linear_cross_entropy
from nearlight.ops.linear_cross_entropy.record import OP
from nearlight.ops.linear_cross_entropy.reference import reference

__all__ = ["OP", "linear_cross_entropy", "reference"]
