// Kernels whose machine code is known: a copy, spills, a local array, an atomic, one arch alone.
template <typename T>
__global__ void __launch_bounds__(256) copy(T* out, const T* in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i];
}

extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = out[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[95 - i];
}

extern "C" __global__ void local_array(float* out, const int* index, int n) {
  float values[96];
  for (int i = 0; i < 96; ++i) values[i] = out[i * 32 + threadIdx.x];
  for (int i = 0; i < n; ++i) values[index[i]] += 1.0f;
  out[threadIdx.x] = values[index[n]];
}

__global__ void sum(float* out, const float4* in) {
  float4 four = in[threadIdx.x];
  atomicAdd(out, four.x + four.y + four.z + four.w);
}
