"""Cross entropy of logits, with their gradient in the same pass.

    z = logit_scale · logits, softcapped; loss = −log softmax(z)[label]
    dlogits = (softmax(z) − onehot(label)) · row weight

Legend: ... (or M) rows, V (or N) vocabulary.

A scalar loss costs one read of the logits and one write of their gradient from HBM: a program reads
a row twice, the second time from L2 and from its end on, and few rows are in flight at once. The
backward scales the gradient, or leaves it where the factor is 1. Rows that are ignored are not read
at all.

Limits: no second derivative; fp16, reduction="none" and compiled calls compute the gradient in the
backward, from the logits and two numbers per row: one read more. A backward with retain_graph
copies the gradient. A NaN in an ignored row stays without effect.
"""

from nearlight.ops.cross_entropy.function import cross_entropy, reference
from nearlight.ops.cross_entropy.record import OP

__all__ = ["OP", "cross_entropy", "reference"]
