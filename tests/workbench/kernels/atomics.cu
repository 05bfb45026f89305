// Atomic additions: of floating numbers, whose sum depends on their order, and of whole ones.
#include <cuda_fp16.h>

__global__ void adds_floats(float* out, const float* x) { atomicAdd(out, x[threadIdx.x]); }

__global__ void uses_the_old_value(float* out, const float* x) {
  out[threadIdx.x + 1] = atomicAdd(out, x[threadIdx.x]);
}

__global__ void adds_pairs_of_halves(__half2* out, const __half2* x) {
  atomicAdd(out, x[threadIdx.x]);
}

__global__ void adds_doubles(double* out, const double* x) { atomicAdd(out, x[threadIdx.x]); }

__global__ void adds_in_shared_memory(float* out, const float* x) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = sum;
}

__global__ void adds_whole_numbers(int* out, const int* x) {
  atomicAdd(out, x[threadIdx.x]);
  atomicMax(out + 1, x[threadIdx.x]);
  atomicCAS(out + 2, 0, x[threadIdx.x]);
}
