"""The table: foreign class → our op. One row per class; a new op or family only adds rows."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nearlight import ops
from nearlight.nn import linear_loss

TRANSFORMERS = ((5, 17), (6, 0))  # versions tried: from, below


def _always(module: nn.Module) -> str:
    return ""


@dataclass(frozen=True)
class Row:
    """How instances of one foreign class take one op.

    Attributes:
        op: name of the op.
        attributes: foreign class → what its patched subclass overrides.
        why_not: instance → why it cannot take the op, or "".
    """

    op: str
    attributes: Callable[[type[nn.Module]], Mapping[str, Any]]
    why_not: Callable[[Any], str] = _always


def _rms_norm(eps: str, casting: Literal["llama", "gemma"], offset: float = 0.0) -> Row:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(
            hidden_states, self.weight, getattr(self, eps), offset=offset, casting=casting
        )

    return Row("rms_norm", lambda base: {"forward": forward})


def _layer_norm_forward(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    return ops.layer_norm(input, self.weight, self.bias, self.eps)


def _torch_rms_norm_forward(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    assert self.eps is not None
    return ops.rms_norm(x, self.weight, self.eps, casting="none")


def _torch_norm_why_not(module: nn.LayerNorm | nn.RMSNorm) -> str:
    if len(module.normalized_shape) != 1:
        return f"normalizes over {len(module.normalized_shape)} dimensions; our op takes the last"
    if module.eps is None:
        return "eps=None depends on the dtype; give the norm an eps"
    return ""


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _swiglu_why_not(activation: str) -> Callable[[Any], str]:
    def why_not(module: Any) -> str:
        found = getattr(module, activation)
        if _is_silu(found):
            return ""
        return f"activation is {type(found).__name__}; swiglu is SiLU only, no op for this one yet"

    return why_not


def _swiglu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


def _packed_swiglu_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.down_proj(ops.swiglu(self.gate_up_proj(hidden_states)))


def _apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.rope(q, k, cos, sin, rotary_dim=cos.shape[-1], heads_dim=unsqueeze_dim)


def _with_global(function: Any, name: str, value: object) -> types.FunctionType:
    """Copy a function, and the functions it wraps, so that its global `name` is `value`.

    The code objects stay the same ones, so any version's forward is kept to the letter. Globals
    are those at the time of the copy.
    """
    inner = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    if inner is not None:
        replaced = _with_global(inner, name, value)
        closure = tuple(
            types.CellType(replaced) if cell.cell_contents is inner else cell
            for cell in closure or ()
        )
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        closure,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    copied.__annotations__ = function.__annotations__
    if inner is not None:
        copied.__dict__["__wrapped__"] = replaced
    return copied


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _rope_why_not(module: Any) -> str:
    if not getattr(module, "use_rope", True):
        return "this layer has no rotary embedding"
    if "apply_rotary_pos_emb" not in _innermost(type(module).forward).__code__.co_names:
        return "forward does not call apply_rotary_pos_emb in this version of transformers"
    return ""


def _attention(base: type[nn.Module]) -> Mapping[str, Any]:
    return {"forward": _with_global(base.forward, "apply_rotary_pos_emb", _apply_rotary_pos_emb)}


def _no_op_yet(what: str) -> Row:
    return Row("", lambda base: {}, lambda module: f"no op for {what} yet")


_LLAMA_NORM = _rms_norm("variance_epsilon", casting="llama")
_GEMMA_NORM = _rms_norm("eps", casting="gemma", offset=1.0)
_MLP = {"MLP": Row("swiglu", lambda base: {"forward": _swiglu_forward}, _swiglu_why_not("act_fn"))}
_PACKED_MLP = {
    "MLP": Row(
        "swiglu", lambda base: {"forward": _packed_swiglu_forward}, _swiglu_why_not("activation_fn")
    )
}
_EXPERTS = {"Experts": _no_op_yet("the experts of a mixture")}
_ROPE = Row("rope", _attention, _rope_why_not)


def _loss(softcap: str = "", divisor: str = "") -> Row:
    attributes = functools.partial(linear_loss.model_attributes, softcap=softcap, divisor=divisor)
    return Row("linear_cross_entropy", attributes, linear_loss.why_not)


_LOSS = _loss()


def _family(module: str, prefix: str, **rows: Row) -> dict[str, Row]:
    path = f"transformers.models.{module}.modeling_{module}.{prefix}"
    return {path + suffix: row for suffix, row in rows.items()}


def _decoder(
    module: str,
    prefix: str,
    norm: Row = _LLAMA_NORM,
    mlp: dict[str, Row] = _MLP,
    loss: Row = _LOSS,
) -> dict[str, Row]:
    return _family(module, prefix, RMSNorm=norm, Attention=_ROPE, ForCausalLM=loss, **mlp)


_GEMMA_LOSS = _loss(softcap="final_logit_softcapping")

TABLE: dict[str, Row] = {
    **_decoder("llama", "Llama"),
    **_decoder("mistral", "Mistral"),
    **_decoder("qwen2", "Qwen2"),
    **_decoder("qwen3", "Qwen3"),
    **_decoder("smollm3", "SmolLM3"),
    **_decoder("phi3", "Phi3", mlp=_PACKED_MLP),
    **_decoder("granite", "Granite", loss=_loss(divisor="logits_scaling")),
    **_decoder("mixtral", "Mixtral", mlp=_EXPERTS),
    **_decoder("qwen3_moe", "Qwen3Moe", mlp=_MLP | _EXPERTS),
    **_decoder("gemma2", "Gemma2", norm=_GEMMA_NORM, loss=_GEMMA_LOSS),
    **_decoder("gemma3", "Gemma3", norm=_GEMMA_NORM, loss=_GEMMA_LOSS),
    **_family("gpt2", "GPT2", LMHeadModel=_LOSS, MLP=_no_op_yet("a GELU MLP")),
    "torch.nn.modules.normalization.RMSNorm": Row(
        "rms_norm", lambda base: {"forward": _torch_rms_norm_forward}, _torch_norm_why_not
    ),
    "torch.nn.modules.normalization.LayerNorm": Row(
        "layer_norm", lambda base: {"forward": _layer_norm_forward}, _torch_norm_why_not
    ),
}

OPS = tuple(sorted({row.op for row in TABLE.values() if row.op}))


def class_path(cls: type) -> str:
    """Return the table's key of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
