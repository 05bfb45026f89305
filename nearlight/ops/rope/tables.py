"""Tables of `rope`: cos and sin of any positions, scaled for long contexts, on several axes.

Frequencies and angles are computed in fp32 whatever the model's dtype, operation by operation as
transformers does: bf16 has no room for positions, and at 100,000 tokens another rounding of a
frequency is another angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nearlight.core.rows import FLOATS

# rope_type to the keys that it needs and to those that it may take, as transformers calls them.
_KEYS = {
    "default": ("", ""),
    "linear": ("factor", ""),
    "dynamic": ("factor max_position_embeddings", ""),
    "yarn": (
        "original_max_position_embeddings",
        "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
    "longrope": (
        "original_max_position_embeddings short_factor long_factor",
        "factor attention_factor",
    ),
    "llama3": ("factor low_freq_factor high_freq_factor original_max_position_embeddings", ""),
}
# What may stand beside any of them.
_COMMON = (
    "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved "
    "max_position_embeddings"
)


def rope_tables(
    head_dim: int,
    positions: torch.Tensor,
    base: float | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cos and sin that `rope` takes, for positions of any kind.

    angle of pair i = position · base^(−2i / R), scaled as `parameters` say; tables = attention
    factor · (cos, sin) of it. Built once a step and shared by all layers: what does not depend on
    the positions is copied to their GPU, which a captured CUDA graph does not allow.

    Args:
        head_dim: D, of which R = D · partial_rotary_factor entries turn.
        positions: int64 or int32 of any shape and values, CPU or CUDA: (S,), (B, S), or for
            multimodal sections (axes, S) or (axes, B, S).
        base: of the wave lengths; `rope_theta` of `parameters`, else 10,000, where it is None.
        parameters: `config.rope_parameters` of a transformers model, or a dict with its keys:
            rope_type "default", "linear", "dynamic" (NTK), "yarn", "longrope" or "llama3" with
            the keys of each; partial_rotary_factor; mrope_section with the number of pairs that
            turn by each axis of the positions, in blocks (Qwen2-VL) or, with mrope_interleaved,
            in turns (Qwen3-VL); max_position_embeddings, where the type scales by it.
            "dynamic" and "longrope" go by the largest of the positions.
        interleaved: as in `rope`.
        dtype: of the tables; fp32 is the most exact, bf16 what transformers gives a bf16 model.

    Returns:
        cos and sin, each (S, R) or (B, S, R) on the device of the positions. Halves of them,
        `cos[..., : R // 2]`, do as well with rotary_dim=R, where they are not interleaved.

    Raises:
        ValueError: parameters that are unknown, missing or do not fit.
        TypeError: positions that are not whole numbers, or a dtype that is not allowed.

    Source: Su et al. 2021 (arXiv:2104.09864); YaRN: Peng et al. 2023 (arXiv:2309.00071); LongRoPE:
        Ding et al. 2024 (arXiv:2402.13753); sections: Wang et al. 2024 (arXiv:2409.12191).

    Example:
        >>> import torch
        >>> from nearlight.ops import rope, rope_tables
        >>> q = k = torch.ones(1, 1, 2, 4)
        >>> cos, sin = rope_tables(4, torch.tensor([0, 5]), parameters={"rope_theta": 1e6})
        >>> rope(q, k, cos, sin)[0][0, 0, 0]
        tensor([1., 1., 1., 1.])
    """
    parameters = _checked(parameters or {})
    if positions.dtype not in (torch.int64, torch.int32) or dtype not in FLOATS:
        raise TypeError(
            f"rope_tables: positions are {positions.dtype} and dtype={dtype}; allowed are int64 "
            "and int32 positions, fp16, bf16, fp32 and fp64 tables"
        )
    theta = parameters.get("rope_theta", base)
    if base is not None and base != theta:
        raise ValueError(f"rope_tables: base={base} and rope_theta={theta}: give one of them")
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    theta = 10_000.0 if theta is None else theta
    frequencies, factor = rope_frequencies(rotary_dim, theta, parameters, positions)
    if "mrope_section" in parameters:
        axes = _axes(rotary_dim // 2, parameters, positions)
        angles = positions.movedim(0, -1)[..., axes].float() * frequencies
    else:
        angles = positions[..., None].float() * frequencies
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    if interleaved:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def packed_positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return each token's position within its sequence, where sequences are packed end to end.

    position of token t = t − the last start that is not behind t. Tokens behind the last sequence
    count on from its end.

    Args:
        cu_seqlens: (number of sequences + 1,) int32 or int64 starts, the first 0 and the last the
            end, as variable-length attention takes them; CPU or CUDA.
        num_tokens: T, padding behind the last sequence included.

    Returns:
        (1, T) int64 on the device of `cu_seqlens`: `position_ids` of `rope`, or positions of
        `rope_tables`. Packed q (T, H, D) goes into `rope` as `q[None]` with heads_dim=2.

    Raises:
        ValueError: `cu_seqlens` is no such list. Its values are looked at on the CPU alone, since
            the GPU would have to be waited for.
        TypeError: it does not hold whole numbers.

    Example:
        >>> import torch
        >>> packed_positions(torch.tensor([0, 2, 5]), 6)
        tensor([[0, 1, 0, 1, 2, 0]])
    """
    if cu_seqlens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"packed_positions: cu_seqlens is {cu_seqlens.dtype}, allowed int32, int64")
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0]:
        raise ValueError(
            f"packed_positions: cu_seqlens {tuple(cu_seqlens.shape)}, allowed is (sequences + 1,)"
        )
    starts = cu_seqlens.to(torch.int64).contiguous()
    if starts.is_cpu and not torch.compiler.is_compiling():
        is_sorted = bool((starts.diff() >= 0).all())
        if int(starts[0]) != 0 or not is_sorted or int(starts[-1]) > num_tokens:
            raise ValueError(
                f"packed_positions: cu_seqlens from {int(starts[0])} to {int(starts[-1])} for "
                f"{num_tokens} tokens; allowed are starts that begin at 0, never fall and end at "
                "the number of tokens or before"
            )
    tokens = torch.arange(num_tokens, device=starts.device)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    return (tokens - starts[sequence])[None]


def rope_frequencies(
    rotary_dim: int,
    base: float,
    parameters: Mapping[str, Any],
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """Return the fp32 angle per position of each pair, (R / 2,), and the attention factor.

    Args:
        rotary_dim: R.
        base: of the wave lengths.
        parameters: as in `rope_tables`.
        positions: what "dynamic" and "longrope" go by; the frequencies are on their device, else
            on the CPU.

    Raises:
        ValueError: parameters that do not fit, or positions are missing.
    """
    parameters = _checked(parameters)
    rope_type = parameters["rope_type"]
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(
            f"rope_tables: {rotary_dim} entries of a head would turn (head_dim · "
            "partial_rotary_factor); they turn in pairs, give an even number"
        )
    if positions is None and rope_type in ("dynamic", "longrope"):
        raise ValueError(f"rope_type {rope_type!r} goes by the positions: use rope_tables")
    # On the CPU, where models are made: a GPU rounds powers and quotients otherwise.
    exponents = torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim
    if rope_type == "dynamic":
        base_now = _dynamic_base(rotary_dim, base, parameters, positions)
        return 1.0 / base_now ** _moved(exponents, positions), 1.0
    waves, factor = base**exponents, 1.0
    if rope_type == "longrope":
        return _longrope(waves, parameters, positions)
    frequencies = 1.0 / waves
    if rope_type == "linear":
        frequencies = frequencies / parameters["factor"]
    elif rope_type == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif rope_type == "yarn":
        frequencies, factor = _yarn(waves, base, parameters)
    return _moved(frequencies, positions), factor


def _moved(tensor: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    # Does not wait for the GPU: CUDA copies from pageable memory before it returns.
    return tensor if positions is None else tensor.to(positions.device, non_blocking=True)


def _checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are given, with `rope_type`; None is not given."""
    given = {name: value for name, value in parameters.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type == "mrope":  # as older checkpoints call it
        rope_type = "default"
    if rope_type not in _KEYS:
        raise ValueError(f"rope_type={rope_type!r}: allowed are {', '.join(_KEYS)}")
    given["rope_type"] = rope_type
    needed, optional = (names.split() for names in _KEYS[rope_type])
    if "factor" in optional and "factor" not in given:
        needed.append("max_position_embeddings")
    if missing := [name for name in needed if name not in given]:
        raise ValueError(
            f"rope_type={rope_type!r} needs {', '.join(missing)}: add it to the parameters; what "
            "a model's config.rope_parameters lacks stands in its config itself"
        )
    if "mrope_interleaved" in given and "mrope_section" not in given:
        raise ValueError("mrope_interleaved is given without mrope_section: add the sections")
    allowed = [*needed, *optional, *_COMMON.split()]
    if unknown := sorted(given.keys() - set(allowed)):
        raise ValueError(
            f"rope_type={rope_type!r} does not take {', '.join(unknown)}; allowed are "
            f"{', '.join(allowed)}"
        )
    return given


def _axes(num_pairs: int, parameters: Mapping[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Return the axis of the positions that each pair turns by, (R / 2,)."""
    sections: Sequence[int] = parameters["mrope_section"]
    if sum(sections) != num_pairs or min(sections) < 0:
        raise ValueError(
            f"rope_tables: mrope_section={list(sections)}; allowed are numbers of pairs, 0 or "
            f"more, that add up to the {num_pairs} pairs of a head that turn"
        )
    if positions.ndim < 2 or positions.shape[0] != len(sections):
        raise ValueError(
            f"rope_tables: positions {tuple(positions.shape)} with {len(sections)} sections; "
            f"allowed is ({len(sections)}, S) or ({len(sections)}, B, S): where all axes agree, "
            f"positions.expand({len(sections)}, -1, -1)"
        )
    num_axes = len(sections)
    if parameters.get("mrope_interleaved"):
        # In turns, until an axis has its share; what is left goes to the first.
        axes = [pair % num_axes for pair in range(num_pairs)]
        axes = [axis if pair < num_axes * sections[axis] else 0 for pair, axis in enumerate(axes)]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return _moved(torch.tensor(axes, device="cpu"), positions)


def _last_position(positions: torch.Tensor | None) -> torch.Tensor:
    """Return the length that the positions reach, on their device."""
    assert positions is not None
    if positions.numel() == 0:
        return positions.new_zeros(())
    return positions.max() + 1


def _dynamic_base(
    rotary_dim: int, base: float, parameters: Mapping[str, Any], positions: torch.Tensor | None
) -> torch.Tensor:
    if rotary_dim == 2:
        raise ValueError("rope_type='dynamic' needs four entries that turn or more, not 2")
    factor, longest = parameters["factor"], parameters["max_position_embeddings"]
    length = _last_position(positions).clamp(min=longest).float()
    grown = (factor * length / longest) - (factor - 1)
    return base * grown ** (rotary_dim / (rotary_dim - 2))


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Divide the frequencies of long waves, keep those of short ones, interpolate between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / parameters["factor"] + kept * frequencies


def _yarn(
    waves: torch.Tensor, base: float, parameters: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Interpolate pairs that turn seldom over the trained context, keep those that turn often."""
    original, rotary_dim = parameters["original_max_position_embeddings"], 2 * waves.shape[0]
    scale = parameters.get("factor") or parameters["max_position_embeddings"] / original

    def pair_that_turns(times: float) -> float:
        wave = math.log(original / (times * 2 * math.pi))
        return (rotary_dim * wave) / (2 * math.log(base))

    low = pair_that_turns(parameters.get("beta_fast") or 32)
    high = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(waves.shape[0], device="cpu").float()
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    frequencies = 1.0 / (scale * waves) * (1 - kept) + 1.0 / waves * kept

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    factor = parameters.get("attention_factor")
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if factor is None:
        factor = magnitude(above) / magnitude(below) if above and below else magnitude(1)
    return frequencies, factor


def _longrope(
    waves: torch.Tensor, parameters: Mapping[str, Any], positions: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    original = parameters["original_max_position_embeddings"]
    scale = parameters.get("factor") or parameters["max_position_embeddings"] / original
    short, long = (
        torch.tensor(parameters[name], dtype=torch.float32, device="cpu")
        for name in ("short_factor", "long_factor")
    )
    if short.shape != waves.shape or long.shape != waves.shape:
        raise ValueError(
            f"rope_tables: short_factor has {short.numel()} numbers and long_factor "
            f"{long.numel()}; allowed is one for each of the {waves.numel()} pairs that turn"
        )
    short, long = (_moved(1.0 / (stretch * waves), positions) for stretch in (short, long))
    frequencies = torch.where(_last_position(positions) > original, long, short)
    factor = parameters.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return frequencies, factor
