/* Stands for CUDA's runtime and driver where there is no GPU: two H100 that run nothing (benchmarks/cuda_trace.py).

   Built as libcuda.so.1 and preloaded. It answers what torch asks on the host: devices, streams, events. Fake
   tensors have no memory and launch no kernels; what would need the driver fails. */

#include <cuda_runtime_api.h>
#include <string.h>

static int current = 0;
static const size_t memory = (size_t)80 << 30;

static cudaError_t handle(void **created) {
  static size_t last = 0;
  *created = (void *)(last += 16);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) { *count = 2; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stub of an H100");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->totalGlobalMem = memory;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerMultiprocessor = 1 << 16;
  properties->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = *total = memory; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return handle((void **)stream); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return handle((void **)event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

/* What else torch's library for kernels of its own needs to be loaded: CUDA_ERROR_UNKNOWN. */
#define FAILS(name) int name(void) { return 999; }
FAILS(cuCtxGetCurrent) FAILS(cuCtxSetCurrent) FAILS(cuDeviceGet) FAILS(cuDeviceGetAttribute)
FAILS(cuDevicePrimaryCtxRetain) FAILS(cuFuncGetAttribute) FAILS(cuFuncSetAttribute) FAILS(cuFuncSetCacheConfig)
FAILS(cuGetErrorString) FAILS(cuLaunchCooperativeKernel) FAILS(cuLaunchKernel) FAILS(cuLinkAddData_v2)
FAILS(cuLinkComplete) FAILS(cuLinkCreate_v2) FAILS(cuModuleGetFunction) FAILS(cuModuleLoad) FAILS(cuModuleLoadData)
FAILS(cuModuleLoadDataEx) FAILS(cuModuleUnload) FAILS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FAILS(cuPointerGetAttribute) FAILS(cuTensorMapEncodeTiled)
