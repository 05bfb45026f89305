// Offsets as kernels compute them: sound ones, and products in 32 bits that wrap.

__global__ void row_times_stride(float* out, const float* x, int n, int stride) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  for (int c = threadIdx.x; c < n; c += blockDim.x)
    out[(long long)row * n + c] = x[row * stride + c];  // fault
}

__global__ void unsigned_row(float4* out, const float4* x, unsigned n) {
  unsigned row = blockIdx.x;
  out[(size_t)row * n + threadIdx.x] = x[row * (n / 4) + threadIdx.x];  // fault
}

__global__ void counter_times_size(float* out, const float* x, unsigned rows, unsigned n) {
  float sum = 0;
#pragma unroll 1
  for (unsigned k = 0; k < rows; k++) sum += x[k * n + threadIdx.x];  // fault
  out[threadIdx.x] = sum;
}

__global__ void loaded_row(float* out, const float* x, const int* ids, int n) {
  out[threadIdx.x] = x[ids[blockIdx.x] * n + threadIdx.x];  // fault
}

__global__ void counter_of_many(float* out, const float* x, long long total) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < total) out[i] = x[i];  // fault
}

__global__ void wide(float* out, const float* x, int n, int stride) {
  long long row = blockIdx.x * blockDim.y + threadIdx.y;
  for (int c = threadIdx.x; c < n; c += blockDim.x) out[row * n + c] = x[row * stride + c];
}

__global__ void grid_stride(float* out, const float* x, int total, int step, int limit) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x)
    out[i] = x[i];
  for (int i = threadIdx.x; i < limit; i += step) out[i] = x[i] + 1;
}

__global__ void column_of(float* out, const float* x, int total, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  int row = i / n, column = i - row * n;
  out[i] = x[column] + x[i % n];
}

__global__ void chunk_of_rows(float* out, const float* x, int rows, int rows_per_block, int n) {
  int row = blockIdx.x * rows_per_block + threadIdx.y;
  if (row < rows) out[row] = x[(long long)row * n];
}

__global__ void shared_rows(float* out, const float* x, int pitch) {
  extern __shared__ float tile[];
  tile[threadIdx.y * pitch + threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x * pitch + threadIdx.y];
}

// What overflows is undefined for signed numbers, and the compiler adds to a pointer of 64 bits.
__global__ void signed_counter(float* out, const float* x, int rows, int n) {
  float sum = 0;
#pragma unroll 1
  for (int k = 0; k < rows; k++) sum += x[k * n + (int)threadIdx.x];
  out[threadIdx.x] = sum;
}
