// Reductions within a warp and a block, shared by every kernel that sums or takes a maximum.
#pragma once

namespace nearlight {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

struct Sum {
  static __device__ __forceinline__ float identity() { return 0.0f; }
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};

struct Max {
  static __device__ __forceinline__ float identity() { return -__int_as_float(0x7f800000); }
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};

// Every lane of the warp must call it; every lane gets the result.
template <typename Op>
__device__ __forceinline__ float warp_reduce(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = Op::combine(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

// Every thread of a one-dimensional block must call it; every thread gets the result. The
// order of the sum depends on the block size alone, so runs are bit-equal.
template <typename Op>
__device__ float block_reduce(float value) {
  __shared__ float partial_smem[kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  value = warp_reduce<Op>(value);
  if (lane == 0) partial_smem[warp] = value;
  __syncthreads();
  value = warp_reduce<Op>(lane < num_warps ? partial_smem[lane] : Op::identity());
  // The next call overwrites partial_smem; nobody may still be reading it then.
  __syncthreads();
  return value;
}

}  // namespace nearlight
