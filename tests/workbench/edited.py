"""The scaffold of `new`, turned into x · sigmoid(x) by edits at its three places alone."""

from __future__ import annotations

from pathlib import Path

REFERENCE = """
WORK = {"forward": (4, 1), "backward": (8, 1)}


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


"""
TRITON_KERNELS = """
@jit
def _fwd_kernel(x_ptr, y_ptr, rows, columns, stride_row, stride_column,
                ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(columns, BLOCK_N)
    m = pid // blocks * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (m < rows) & (n < columns)
    x = tl.load(x_ptr + m * stride_row + n * stride_column, inside, other=0.0).to(ACC)
    tl.store(y_ptr + m * columns + n, x / (1.0 + tl.exp(-x)), inside)


@jit
def _bwd_kernel(dy_ptr, x_ptr, dx_ptr, rows, columns, dy_stride_row, dy_stride_column,
                stride_row, stride_column,
                ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(columns, BLOCK_N)
    m = pid // blocks * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (m < rows) & (n < columns)
    dy = tl.load(dy_ptr + m * dy_stride_row + n * dy_stride_column, inside, other=0.0).to(ACC)
    x = tl.load(x_ptr + m * stride_row + n * stride_column, inside, other=0.0).to(ACC)
    s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(dx_ptr + m * columns + n, dy * s * (1.0 + x * (1.0 - s)), inside)


def _grid(x: torch.Tensor, tile: Config) -> tuple[int]:
    return (ceil(x.shape[0] / tile.block_m) * ceil(x.shape[1] / tile.block_n),)


def _options(x: torch.Tensor, tile: Config) -> dict[str, Any]:
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps}
    return {"ACC": triton_accumulator(x.dtype), **sizes}


"""
TRITON_LAUNCHES = (
    "_fwd_kernel[_grid(x, tile)](x, y, *x.shape, *x.stride(), **_options(x, tile))",
    "_bwd_kernel[_grid(x, tile)](dy, x, dx, *x.shape, *dy.stride(), *x.stride(),\n"
    "        **_options(x, tile))",
)
CUDA_KERNELS = """
_CPP = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}


def _kernels(name: str) -> Mapping[torch.dtype, Kernel]:
    source = Path(__file__).with_suffix(".cu")
    return {d: Kernel(source, f"{name}<{_CPP[d]}, {_CPP[accumulator(d)]}>") for d in FLOATS}


_fwd_kernels, _bwd_kernels = _kernels("silu_fwd"), _kernels("silu_bwd")


def _launch(x: torch.Tensor, tile: Config) -> tuple[Any, Any]:
    return (ceil(x.shape[1] / tile.across), tile.groups), (tile.across, tile.down)


"""
CUDA_LAUNCHES = (
    "_fwd_kernels[x.dtype][_launch(x, tile)](x, y, *x.shape, *x.stride())",
    "_bwd_kernels[x.dtype][_launch(x, tile)](dy, x, dx, *x.shape, *dy.stride(), *x.stride())",
)
LAUNCHERS = '''def forward(x: torch.Tensor) -> torch.Tensor:
    """Return y, contiguous."""
    y = x.new_empty(x.shape)
    if y.numel():
        tile = config(tuple(x.shape), x.dtype, launch_gpu(x.device))
        {}
    return y


def backward(dy: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return dx, contiguous."""
    dx = x.new_empty(x.shape)
    if dx.numel():
        tile = config(tuple(x.shape), x.dtype, launch_gpu(x.device))
        {}
    return [dx]


'''
FUNCTION = '''
def silu(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Return x · sigmoid(x)."""
    check_rows("silu", x)
    if x.ndim != 2:
        raise ValueError(f"silu: x has shape {tuple(x.shape)}; allowed are two dimensions")
    return _forward_op(x) if use_LANG(backend, x) else reference(x)


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = case.shape["rows"], case.shape["columns"]
    wide = torch.promote_types(case.dtype, torch.float32)
    x = torch.randn(shape, generator=generator, device=device, dtype=wide).to(case.dtype)
    return {"x": x.requires_grad_()}


def _extra_bytes(case: Case) -> int:
    return 0


'''
CUDA_FILE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T, typename Acc>
__global__ void silu_fwd(const T* x_ptr, T* y_ptr, long long rows, long long columns,
    long long stride_row, long long stride_column) {
  const long long n = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= columns) return;
  const long long step = (long long)gridDim.y * blockDim.y;
  for (long long m = (long long)blockIdx.y * blockDim.y + threadIdx.y; m < rows; m += step) {
    const Acc x = Acc(x_ptr[m * stride_row + n * stride_column]);
    y_ptr[m * columns + n] = T(x / (Acc(1) + exp(-x)));
  }
}

template <typename T, typename Acc>
__global__ void silu_bwd(const T* dy_ptr, const T* x_ptr, T* dx_ptr, long long rows,
    long long columns, long long dy_stride_row, long long dy_stride_column, long long stride_row,
    long long stride_column) {
  const long long n = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= columns) return;
  const long long step = (long long)gridDim.y * blockDim.y;
  for (long long m = (long long)blockIdx.y * blockDim.y + threadIdx.y; m < rows; m += step) {
    const Acc dy = Acc(dy_ptr[m * dy_stride_row + n * dy_stride_column]);
    const Acc x = Acc(x_ptr[m * stride_row + n * stride_column]);
    const Acc s = Acc(1) / (Acc(1) + exp(-x));
    dx_ptr[m * columns + n] = T(dy * s * (Acc(1) + x * (Acc(1) - s)));
  }
}
"""


def edit(file: Path, lang: str) -> None:
    """Edit an op's file (and its .cu) at the places that `new` names, so that it is SiLU."""
    kernels, launches = (
        (TRITON_KERNELS, TRITON_LAUNCHES) if lang == "triton" else (CUDA_KERNELS, CUDA_LAUNCHES)
    )
    text = file.read_text(encoding="utf-8")
    for number, new, end in (
        (1, REFERENCE, "@dataclass(frozen=True)\nclass Config"),
        (2, kernels + LAUNCHERS.format(*launches), "# From here to the function"),
        (3, FUNCTION.replace("LANG", lang), "def _case("),
    ):
        start = text.index("\n", text.index(f"# EDIT {number} of 3: ")) + 1
        text = text[:start] + new.replace("silu", file.stem) + text[text.index(end, start) :]
    file.write_text(text, encoding="utf-8")
    if lang == "cuda":
        file.with_suffix(".cu").write_text(CUDA_FILE.replace("silu", file.stem), encoding="utf-8")
