#include <cuda_bf16.h>

// y[r, c] = factor * (x[r, c] - mean of x[r, :]); one block of a power of two threads per row.
// Every #ifdef is one fault; without a definition the kernel is sound.
#ifdef INT32_OFFSET
using offset_t = int;
#else
using offset_t = long long;
#endif

constexpr int MAX_THREADS = 128;

template <typename T>
__global__ void center(T* y, const T* x, long long num_columns, long long stride_row,
                       long long stride_column, float factor) {
  __shared__ double partial_smem[MAX_THREADS];
  const offset_t row = blockIdx.x;
  const int thread = threadIdx.x;
  const T* x_row = x + row * static_cast<offset_t>(stride_row);
  T* y_row = y + row * static_cast<offset_t>(num_columns);
#ifdef ASSUMES_CONTIGUOUS
  stride_column = 1;
#endif

  double total = 0.0;
  for (long long c = thread; c < num_columns; c += blockDim.x)
    total += static_cast<float>(x_row[c * stride_column]);

#ifdef RACE
  if (thread == 0) partial_smem[0] = 0.0;
  __syncthreads();
  partial_smem[0] += total;
  __syncthreads();
#else
  partial_smem[thread] = total;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half) partial_smem[thread] += partial_smem[thread + half];
#ifndef MISSING_BARRIER
    __syncthreads();
#endif
  }
#endif
  const double mean = partial_smem[0] / num_columns;

#if defined(ONE_PAST_THE_END)
  const long long end = num_columns + 1;
#elif defined(UNWRITTEN_COLUMN)
  const long long end = num_columns - 1;
#else
  const long long end = num_columns;
#endif
  for (long long c = thread; c < end; c += blockDim.x) {
    const double centered = static_cast<float>(x_row[c * stride_column]) - mean;
#ifdef READS_UNINITIALISED
    y_row[c] = static_cast<T>(static_cast<float>(y_row[c]) + static_cast<float>(factor * centered));
#else
    y_row[c] = static_cast<T>(static_cast<float>(factor * centered));
#endif
  }
}
