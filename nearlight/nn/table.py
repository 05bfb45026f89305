"""The table: foreign class → our op. One row per class; a new op or family only adds rows."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nearlight import ops
from nearlight.core.rows import MAX_WIDTH
from nearlight.nn import linear_loss
from nearlight.nn.hooks import hook_in_the_way

TRANSFORMERS = ((5, 17), (6, 0))  # versions tried: from, below


def _always(module: nn.Module) -> str:
    return ""


def _norm_why_not(module: Any) -> str:
    width = 0 if module.weight is None else module.weight.shape[-1]
    return _too_wide(width)


def _too_wide(width: int) -> str:
    return f"rows are {width} wide; our op takes at most {MAX_WIDTH}" if width > MAX_WIDTH else ""


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

    return Row("rms_norm", lambda base: {"forward": forward}, _norm_why_not)


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
    return _too_wide(module.normalized_shape[0])


def _silu_why_not(activation: Any) -> str:
    cls = type(activation)
    is_theirs = cls.__name__ == "SiLUActivation" and cls.__module__ == "transformers.activations"
    if cls is not nn.SiLU and not is_theirs:
        return f"activation is {cls.__name__}; swiglu is SiLU only, no op for this one yet"
    if "forward" in activation.__dict__:
        return f"forward of the activation, {cls.__name__}, was replaced on this instance"
    hook = hook_in_the_way(activation, is_called=False)
    return f"{cls.__name__} has a {hook} hook, and swiglu would pass it by" if hook else ""


def _swiglu(activation: str, gate_up: Callable[[Any, torch.Tensor], torch.Tensor]) -> Row:
    """Return the row of a feed-forward block whose activation module has this name.

    The activation is not called any more, so each call asks whether it is still a bare SiLU.
    """

    def attributes(base: Any) -> Mapping[str, Any]:
        original = base.forward

        @functools.wraps(original)
        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            if _silu_why_not(getattr(self, activation)):
                result: torch.Tensor = original(self, hidden_states)
                return result
            return self.down_proj(gate_up(self, hidden_states))  # type: ignore[no-any-return]  # foreign

        return {"forward": forward}

    return Row("swiglu", attributes, lambda module: _silu_why_not(getattr(module, activation)))


def _two_products(module: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(module.gate_proj(x), module.up_proj(x))


def _packed_product(module: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(module.gate_up_proj(x))


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


_ROPE_NAME = "apply_rotary_pos_emb"


def _rope_why_not(module: Any) -> str:
    if not getattr(module, "use_rope", True):
        return "this layer has no rotary embedding"
    inner = _innermost(type(module).forward)
    if _ROPE_NAME not in inner.__code__.co_names:
        return f"forward does not call {_ROPE_NAME} in this version of transformers"
    if not _is_own_rope(inner):
        return f"{_ROPE_NAME} of {type(module).__module__} was replaced"
    return ""


def _is_own_rope(forward: Any) -> bool:
    """Return whether a forward would call the function of its own file."""
    code = getattr(forward.__globals__[_ROPE_NAME], "__code__", None)
    return code is not None and code.co_filename == forward.__code__.co_filename


def _attention(base: Any) -> Mapping[str, Any]:
    """Return a forward with our rope, while all else that it calls is what it was here."""
    original = base.forward
    inner = _innermost(original)
    fused = _with_global(original, _ROPE_NAME, _apply_rotary_pos_emb)
    modeling = sys.modules[base.__module__]
    is_own = _is_own_rope(inner)
    called = [(n, inner.__globals__[n]) for n in inner.__code__.co_names if n in inner.__globals__]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Replaced in transformers' module after patching: the user's wish goes first.
        if is_own and all(getattr(modeling, name) is value for name, value in called):
            return fused(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return {"forward": forward}


def _no_op_yet(what: str) -> Row:
    return Row("", lambda base: {}, lambda module: f"no op for {what} yet")


_LLAMA_NORM = _rms_norm("variance_epsilon", casting="llama")
_GEMMA_NORM = _rms_norm("eps", casting="gemma", offset=1.0)
_MLP = {"MLP": _swiglu("act_fn", _two_products)}
_PACKED_MLP = {"MLP": _swiglu("activation_fn", _packed_product)}
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


def _vision_language(module: str, prefix: str, text: str, mlp: str) -> dict[str, Row]:
    """Return the rows of a text tower and its head; norms of the vision tower are torch's or its.

    Args:
        module: file of the model.
        prefix: of the classes of the whole.
        text: prefix of the text tower's norm and attention.
        mlp: prefix of its feed-forward block.
    """
    return {
        **_family(module, prefix, ForConditionalGeneration=_LOSS),
        **_family(module, text, RMSNorm=_LLAMA_NORM, Attention=_ROPE),
        **_family(module, mlp, **_MLP),
    }


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
    **_vision_language("qwen2_vl", "Qwen2VL", text="Qwen2VL", mlp="Qwen2"),
    **_vision_language("qwen2_5_vl", "Qwen2_5_VL", text="Qwen2_5_VL", mlp="Qwen2"),
    **_family("qwen2_5_vl", "Qwen2_5_VL", **_MLP),  # of its vision tower
    **_vision_language("qwen3_vl", "Qwen3VL", text="Qwen3VLText", mlp="Qwen3VLText"),
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
