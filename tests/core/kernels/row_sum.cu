#include <cuda_bf16.h>

#include "nearlight/reduce.cuh"

// out[row] = scale * sum(x[row, :]); one block per row.
template <typename T>
__global__ void row_sum(float* out, const T* __restrict__ x, long long num_columns, float scale) {
  const T* row = x + static_cast<long long>(blockIdx.x) * num_columns;
  float total = 0.0f;
  for (long long i = threadIdx.x; i < num_columns; i += blockDim.x)
    total += static_cast<float>(row[i]);
  total = nearlight::block_reduce<nearlight::Sum>(total);
  if (threadIdx.x == 0) out[blockIdx.x] = scale * total;
}

extern "C" __global__ void __launch_bounds__(256) fill(int* out, int value, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
