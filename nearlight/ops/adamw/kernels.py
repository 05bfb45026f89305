"""The kernel of AdamW and how it is launched: one program per chunk of any tensor of a table."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from nearlight.core.blockwise import BLOCK
from nearlight.core.hardware import Gpu
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable

# Columns of the table of tensors; pointers as integers.
(PARAM, PARAM_OUT, GRAD, EXP_AVG, EXP_AVG_OUT, EXP_AVG_SQ, EXP_AVG_SQ_OUT, STEP, NUMEL, FIRST_CHUNK,
 KIND) = (tl.constexpr(column) for column in range(11))  # fmt: skip
NUM_COLUMNS = tl.constexpr(11)
# Added to the kind of a tensor whose states have eight bits.
EIGHT_BIT = tl.constexpr(8)
# A tile is some blocks of a state; a line of it is one.
WIDTH = tl.constexpr(BLOCK)
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass BigCrush (Salmon et al. 2011)


@dataclass(frozen=True)
class Config:
    """A program's chunk: tiles of so many lines of 256 elements, and its warps."""

    lines: int
    tiles: int
    num_warps: int

    @property
    def chunk(self) -> int:
        """Elements of a program."""
        return self.lines * self.tiles * BLOCK


def candidates(kinds: int, gpu: Gpu | None) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    found = (
        Config(lines, tiles, num_warps)
        for num_warps in (4, 8, 16)
        for lines in (num_warps // 2, num_warps, 2 * num_warps)
        for tiles in (1, 2, 4, 8)
    )
    return dict.fromkeys(found, "")


@tunable("adamw", candidates)
def config(kinds: int, gpu: Gpu | None) -> Config:
    """Choose the launch for the kinds of tensors in the table, a bit each.

    Eight elements of four streams to a thread are 128 bytes in flight each for fp32.
    """
    if gpu is None:  # each program costs the same, whatever its tile
        return Config(256, 1, 4)
    if kinds >> EIGHT_BIT.value:  # encoding takes registers: half as much to a thread
        return Config(4, 8, 8)
    return Config(8, 4, 8)


@jit
def _double(bits):
    """Return the number of which `bits` are those of its negative."""
    return -(bits.to(tl.float64, bitcast=True))


@jit
def _bias_correction(step, log_beta, ACC: tl.constexpr):
    """Return 1 - beta^step; a difference of nearly equal numbers only where fp64 has digits."""
    z = (step.to(tl.float64) * log_beta).to(ACC)
    correction = 1.0 - tl.exp(z)
    if ACC == tl.float32:
        series = 1.0 + z / 6.0 * (1.0 + z / 7.0 * (1.0 + z / 8.0))
        series = 1.0 + z / 3.0 * (1.0 + z / 4.0 * (1.0 + z / 5.0 * series))
        correction = tl.where(z > -0.5, -z * (1.0 + z / 2.0 * series), correction)
    return correction


@jit
def _pointer(row_ptr, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row_ptr + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _decode(codes, SIGNED: tl.constexpr):
    """See `nearlight.core.blockwise`."""
    TOP: tl.constexpr = 7 if SIGNED else 8
    whole = codes.to(tl.int32)
    body = whole & 127 if SIGNED else whole
    bits = (body + 1).to(tl.float32).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    power = ((3 * ((bits >> 23) - 127 - TOP) + 127) << 23).to(tl.float32, bitcast=True)
    value = tl.where(body == 0, 0.0, (7.0 * mantissa - 6.0) * power)
    return tl.where(whole >= 128, -value, value) if SIGNED else value


@jit
def _encode(x, SIGNED: tl.constexpr):
    """See `nearlight.core.blockwise`."""
    TOP: tl.constexpr = 7 if SIGNED else 8
    y = tl.abs(x)
    y = tl.where(y <= 1.0, y, 1.0)
    exponent = (y.to(tl.int32, bitcast=True) >> 23) - 127
    j = tl.maximum(TOP - 43 + (exponent + 129) // 3, 0)
    ratio = y * ((3 * (TOP - j) + 127) << 23).to(tl.float32, bitcast=True)
    c = (1.0 + (ratio - 1.0) / 7.0) * ((j + 127) << 23).to(tl.float32, bitcast=True)
    body = tl.where(j < 1, tl.floor(y * 8.0 ** (TOP - 1) + 0.5), tl.floor(c - 0.5)).to(tl.int32)
    body = tl.minimum(body, (1 << TOP) - 1)
    if SIGNED:
        body = body | tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)
    else:
        body = tl.maximum(body, (y > 0.0).to(tl.int32))
    return body.to(tl.uint8)


@jit
def _state(row_ptr, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, start, numel):
    """Return pointers to a tile of a state and to its scales; the latter only of eight bits."""
    pointer = _pointer(row_ptr, COLUMN, TYPE, ALIGNED)
    if TYPE == tl.uint8:
        scales = pointer + tl.cdiv(numel, WIDTH) * WIDTH
        scales = scales.to(tl.pointer_type(tl.float32), bitcast=True) + start // WIDTH
    else:
        scales = pointer
    return pointer + start, scales


@jit
def _load_state(state_ptr, scales_ptr, at, line, mask, SIGNED: tl.constexpr, BITS: tl.constexpr):
    if BITS == 8:
        codes = tl.load(state_ptr + at, mask, other=0)
        scales = tl.load(scales_ptr + line, tl.max(mask.to(tl.int32), 1) > 0, other=0.0)
        return _decode(codes, SIGNED) * scales[:, None]
    else:  # Triton compiles what stands behind an `if` that returns, too
        return tl.load(state_ptr + at, mask, other=0.0)


@jit
def _store_state(
    state_ptr, scales_ptr, old_ptr, old_scales_ptr, value, at, line, mask, is_skipped,
    SIGNED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    if BITS == 8:
        line_mask = tl.max(mask.to(tl.int32), 1) > 0
        value = tl.where(mask, value, 0.0)
        scales = tl.max(tl.where(value == value, tl.abs(value), float("inf")), 1)
        codes = _encode(value / tl.where(scales == 0.0, 1.0, scales)[:, None], SIGNED)
        # A skipped step keeps the codes: decoded and encoded again they could change.
        codes = tl.where(is_skipped, tl.load(old_ptr + at, mask, other=0), codes)
        scales = tl.where(is_skipped, tl.load(old_scales_ptr + line, line_mask, other=0.0), scales)
        # All of the last block is written, or its rest would stay what it was allocated with.
        tl.store(state_ptr + at, codes, line_mask[:, None])
        tl.store(scales_ptr + line, scales, line_mask)
    else:
        tl.store(state_ptr + at, value, mask)


@jit
def _rounded(value, at, seed, tensor, step, TYPE: tl.constexpr):
    """Round fp32 to bf16, up with the probability of the bits cut off."""
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
    counter = low * 0 + tensor.to(tl.uint32)
    random, _, _, _ = tl.philox(
        seed, low, high, counter, low * 0 + step.to(tl.uint32), PHILOX_ROUNDS
    )
    bits = value.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(is_finite, bits + (random & 0xFFFF), bits) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(TYPE)


@jit
def _update_tile(
    row_ptr, start, numel, scalars, seed, tensor,
    P: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr,
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    decay, beta1, weight1, beta2, weight2, step_size, root2, eps, scale, is_skipped, step = scalars
    STATE: tl.constexpr = tl.uint8 if BITS == 8 else (tl.float64 if P == tl.float64 else tl.float32)
    line = tl.arange(0, LINES)
    # 64 bits for the start of the tile alone: offsets in it cost half the registers.
    at = line[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = at < numel - start if MASKED else tl.full(at.shape, True, tl.int1)
    m_ptr, m_scales = _state(row_ptr, EXP_AVG, STATE, ALIGNED, start, numel)
    v_ptr, v_scales = _state(row_ptr, EXP_AVG_SQ, STATE, ALIGNED, start, numel)
    p_ptr = _pointer(row_ptr, PARAM, P, ALIGNED) + start
    g_ptr = _pointer(row_ptr, GRAD, G, ALIGNED) + start
    if MASKED:
        p, g = tl.load(p_ptr + at, mask, other=0.0), tl.load(g_ptr + at, mask, other=0.0)
    else:
        p, g = tl.load(p_ptr + at), tl.load(g_ptr + at)
    m_old = _load_state(m_ptr, m_scales, at, line, mask, True, BITS)
    v_old = _load_state(v_ptr, v_scales, at, line, mask, False, BITS)
    g = g.to(m_old.dtype) / scale
    if MAXIMIZE:
        g = -g
    # As torch interpolates: from the nearer end.
    m = tl.where(weight1 < 0.5, m_old + weight1 * (g - m_old), g - (g - m_old) * beta1)
    v = v_old * beta2 + weight2 * g * g
    if v.dtype == tl.float32:
        root = tl.sqrt_rn(v)
    else:
        root = tl.sqrt(v)
    new = p.to(m.dtype) * decay - step_size * (m / (root / root2 + eps))
    if seed is not None:
        new = _rounded(new, start + at, seed, tensor, step, P) if P == tl.bfloat16 else new.to(P)
    else:
        new = new.to(P)
    new = tl.where(is_skipped, p, new)
    tl.store(_pointer(row_ptr, PARAM_OUT, P, ALIGNED) + start + at, new, mask)
    m_out, m_out_scales = _state(row_ptr, EXP_AVG_OUT, STATE, ALIGNED, start, numel)
    v_out, v_out_scales = _state(row_ptr, EXP_AVG_SQ_OUT, STATE, ALIGNED, start, numel)
    if BITS != 8:
        m, v = tl.where(is_skipped, m_old, m), tl.where(is_skipped, v_old, v)
    _store_state(m_out, m_out_scales, m_ptr, m_scales, m, at, line, mask, is_skipped, True, BITS)
    _store_state(v_out, v_out_scales, v_ptr, v_scales, v, at, line, mask, is_skipped, False, BITS)


@jit
def _update(
    table_ptr, tensor, hyper, seed, scale_ptr, found_inf_ptr,
    P: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr, LINES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if P == tl.float64 else tl.float32
    row_ptr = table_ptr + tensor.to(tl.int64) * NUM_COLUMNS
    numel = tl.load(row_ptr + NUMEL)
    step = tl.load(tl.load(row_ptr + STEP).to(tl.pointer_type(tl.float32)))
    lr, beta1, beta2, eps, weight_decay, log_beta1, log_beta2 = hyper
    step_size = lr.to(ACC) / _bias_correction(step, log_beta1, ACC)
    root2 = tl.sqrt(_bias_correction(step, log_beta2, ACC))
    scale = tl.full([], 1.0, ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(ACC)
    is_skipped = tl.full([], False, tl.int1)
    if found_inf_ptr is not None:
        is_skipped = tl.load(found_inf_ptr) == 1.0
    scalars = (
        (1.0 - lr * weight_decay).to(ACC), beta1.to(ACC), (1.0 - beta1).to(ACC), beta2.to(ACC),
        (1.0 - beta2).to(ACC), step_size, root2, eps.to(ACC), scale, is_skipped, step,
    )  # fmt: skip
    TILE: tl.constexpr = LINES * WIDTH
    start = (tl.program_id(0) - tl.load(row_ptr + FIRST_CHUNK)) * (TILE * TILES)
    for tile in range(TILES):
        first = start + tile * TILE
        if first + TILE <= numel:
            _update_tile(row_ptr, first, numel, scalars, seed, tensor, P, G, BITS,
                         False, ALIGNED, MAXIMIZE, LINES)  # fmt: skip
        elif first < numel:
            _update_tile(row_ptr, first, numel, scalars, seed, tensor, P, G, BITS,
                         True, ALIGNED, MAXIMIZE, LINES)  # fmt: skip


@jit(
    do_not_specialize=[
        "lr", "beta1", "beta2", "eps", "weight_decay", "log_beta1", "log_beta2", "seed",
    ]
)  # fmt: skip
def _adamw_fwd_kernel(
    table_ptr,  # (tensors, NUM_COLUMNS) int64
    chunks_ptr,  # (programs,) int32: the tensor of each
    lr_ptr, scale_ptr, found_inf_ptr,  # one number each, or None
    lr, beta1, beta2, eps, weight_decay, log_beta1, log_beta2,  # bits, see `_double`
    seed,  # None to round to nearest
    KINDS: tl.constexpr,  # a bit for each kind in the table
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr,
    LOG_LINES: tl.constexpr, TILES: tl.constexpr,  # a chunk
):  # fmt: skip
    tensor = tl.load(chunks_ptr + tl.program_id(0))
    kind = tl.load(table_ptr + tensor.to(tl.int64) * NUM_COLUMNS + KIND)
    rate = _double(lr)
    if lr_ptr is not None:
        rate = tl.load(lr_ptr).to(tl.float64)
    hyper = (rate, _double(beta1), _double(beta2), _double(eps), _double(weight_decay),
             _double(log_beta1), _double(log_beta2))  # fmt: skip
    for index in tl.static_range(14):
        if (KINDS >> index) & 1 != 0:
            PAIR: tl.constexpr = index % 8
            P: tl.constexpr = (
                tl.float32 if PAIR == 0
                else tl.bfloat16 if PAIR < 3
                else tl.float16 if PAIR < 5
                else tl.float64
            )  # fmt: skip
            G: tl.constexpr = tl.float32 if PAIR % 2 == 0 else P
            BITS: tl.constexpr = 8 if index >= EIGHT_BIT else 32
            if kind == index:
                _update(table_ptr, tensor, hyper, seed, scale_ptr, found_inf_ptr,
                        P, G, BITS, ALIGNED, MAXIMIZE, 1 << LOG_LINES, TILES)  # fmt: skip
