/* A driver of CUDA and NVML for one GPU that is not there: kernels are loaded, and what would be launched is written down.

   Built as libcuda.so.1 and libnvidia-ml.so.1. MAX finds all functions of its table here; those it does not need do nothing. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char something[64];

static FILE *record(void) {
  static FILE *file;
  if (!file) {
    file = fopen(getenv("LAUNCHES"), "a");
    setvbuf(file, NULL, _IOLBF, 0);
  }
  return file;
}

/* An H200. */

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  static const int known[][2] = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32},
      {12, 65536}, {13, 1980000}, {16, 132}, {33, 1}, {34, 0}, {36, 3201000}, {37, 6144}, {38, 62914560}, {39, 2048},
      {50, 0}, {75, 9}, {76, 0}, {81, 233472}, {82, 65536}, {97, 232448}, {106, 32},
  };
  *value = 1;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return 0;
}

int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int index) { return *device = index, 0; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "NVIDIA H200"), 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 1, 16), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 140ull << 30, 0; }
int cuMemGetInfo_v2(size_t *free, size_t *all) { return *free = *all = 140ull << 30, 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t bytes) { return *n = 2, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *f) { return *value = attribute ? 64 : 1024, 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex(unsigned i, void **device) { return *device = something, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) { return *device = something, 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { return snprintf(name, size, "NVIDIA H200"), 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return snprintf(version, size, "580.95.05"), 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = 9, *minor = 0, 0; }
const char *nvmlErrorString(int error) { return "an error"; }

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info) {
  info[0] = info[1] = 140ull << 30;
  info[2] = 0;
  return 0;
}

int nvmlDeviceGetPciInfo_v3(void *device, char *info) {
  /* The bus is 1, as the attributes 33, 34 and 50 above say. */
  memset(info, 0, 68);
  ((unsigned *)(info + 16))[1] = 1;
  return 0;
}

/* What is made: contexts, streams, events, memory. */

int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = something, 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { return *context = something, 0; }
int cuCtxGetCurrent(void **context) { return *context = something, 0; }
int cuCtxPopCurrent(void **context) { return context ? *context = something, 0 : 0; }
int cuCtxPopCurrent_v2(void **context) { return context ? *context = something, 0 : 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
int cuStreamCreate(void **stream, unsigned flags) { return *stream = something, 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = something, 0; }
int cuStreamIsCapturing(void *stream, int *is) { return *is = 0, 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *is, void *a, void *b, void *c, void *d) { return *is = 0, 0; }
int cuEventCreate(void **event, unsigned flags) { return *event = something, 0; }
int cuDeviceGetMemPool(void **pool, int device) { return *pool = something, 0; }
int cuDeviceGetDefaultMemPool(void **pool, int device) { return *pool = something, 0; }
int cuMemGetAllocationGranularity(size_t *bytes, void *properties, int flags) { return *bytes = 2 << 20, 0; }
int cuMulticastGetGranularity(size_t *bytes, void *properties, int flags) { return *bytes = 2 << 20, 0; }
int cuMemCreate(uint64_t *handle, size_t bytes, void *properties, uint64_t flags) { return *handle = 1, 0; }
int cuMemAllocHost_v2(void **memory, size_t bytes) { return *memory = malloc(bytes), 0; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { return *memory = malloc(bytes), 0; }

static int give(uintptr_t *address, size_t bytes) {
  static uintptr_t next = (uintptr_t)0x7f << 40;
  *address = next;
  next += (bytes + 511) & ~(size_t)511;
  return 0;
}

int cuMemAlloc_v2(uintptr_t *address, size_t bytes) { return give(address, bytes); }
int cuMemAllocAsync(uintptr_t *address, size_t bytes, void *stream) { return give(address, bytes); }
int cuMemAddressReserve(uintptr_t *address, size_t bytes, size_t alignment, uintptr_t wanted, uint64_t flags) {
  return give(address, bytes);
}

/* Kernels: what a module is loaded from is its PTX. */

typedef struct {
  char name[300];
  int lines;
} Kernel;

int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
  return *module = (void *)image, 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  Kernel *kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  /* Of its name, what is of its text and types is left out. */
  char *hash = strrchr(kernel->name, '_');
  if (hash && strlen(hash) == 17) *hash = 0;
  for (const char *c = module; *c; c++) kernel->lines += *c == '\n';
  *function = kernel;
  return 0;
}

typedef struct {
  int id;
  int pad;
  unsigned value[16];
} Attribute;

typedef struct {
  unsigned grid[3], block[3], bytes;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Launch;

int cuLaunchKernelEx(const Launch *launch, Kernel *kernel, void **arguments, void **extra) {
  const unsigned *g = launch->grid, *b = launch->block;
  fprintf(record(), "launch %s lines=%d grid=%u,%u,%u block=%u,%u,%u bytes=%u", kernel->name, kernel->lines, g[0], g[1],
          g[2], b[0], b[1], b[2], launch->bytes);
  for (unsigned i = 0; i < launch->count; i++) {
    const unsigned *value = launch->attributes[i].value;
    /* 4 is the dimensions of a cluster, 6 programmatic dependent launch. */
    if (launch->attributes[i].id == 4) fprintf(record(), " cluster=%u,%u,%u", value[0], value[1], value[2]);
    if (launch->attributes[i].id == 6) fprintf(record(), " dependent=%u", value[0]);
  }
  fprintf(record(), "\n");
  return 0;
}

int cuLaunchKernel(Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned bytes, void *stream, void **arguments, void **extra) {
  Launch launch = {{gx, gy, gz}, {bx, by, bz}, bytes, stream, NULL, 0};
  return cuLaunchKernelEx(&launch, kernel, arguments, extra);
}

/* The rest. */

#define NOTHING(name) int name(void) { return 0; }
#define EACH(X) \
  X(cuInit) X(cuCtxDestroy) X(cuCtxEnablePeerAccess) X(cuCtxPushCurrent) X(cuCtxSetCurrent) X(cuDeviceCanAccessPeer) \
  X(cuDeviceGetGraphMemAttribute) X(cuDeviceGetP2PAttribute) X(cuDevicePrimaryCtxRelease_v2) X(cuEventDestroy) \
  X(cuEventElapsedTime) X(cuEventQuery) X(cuEventRecord) X(cuEventSynchronize) X(cuFuncGetParamInfo) \
  X(cuFuncSetAttribute) X(cuGetErrorName) X(cuGetErrorString) X(cuGraphAddChildGraphNode) X(cuGraphAddEmptyNode) \
  X(cuGraphAddKernelNode) X(cuGraphAddKernelNode_v2) X(cuGraphAddMemcpyNode) X(cuGraphAddMemsetNode) X(cuGraphCreate) \
  X(cuGraphDebugDotPrint) X(cuGraphDestroy) X(cuGraphExecDestroy) X(cuGraphInstantiate) X(cuGraphInstantiateWithFlags) \
  X(cuGraphInstantiateWithParams) X(cuGraphKernelNodeSetAttribute) X(cuGraphLaunch) X(cuLaunchHostFunc) \
  X(cuMemAddressFree) X(cuMemExportToShareableHandle) X(cuMemFreeAsync) X(cuMemFreeHost) X(cuMemFree_v2) \
  X(cuMemGetAddressRange_v2) X(cuMemGetHandleForAddressRange) X(cuMemHostGetDevicePointer_v2) X(cuMemHostRegister_v2) \
  X(cuMemHostUnregister) X(cuMemMap) X(cuMemPoolSetAccess) X(cuMemPoolTrimTo) X(cuMemRelease) X(cuMemSetAccess) \
  X(cuMemUnmap) X(cuMemcpyBatchAsync) X(cuMemcpyDtoDAsync_v2) X(cuMemcpyDtoD_v2) X(cuMemcpyDtoHAsync_v2) \
  X(cuMemcpyDtoH_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyHtoD_v2) X(cuMemcpyPeer) X(cuMemcpyPeerAsync) \
  X(cuMemsetD16Async) X(cuMemsetD16_v2) X(cuMemsetD2D32Async) X(cuMemsetD2D32_v2) X(cuMemsetD32Async) \
  X(cuMemsetD32_v2) X(cuMemsetD8Async) X(cuMemsetD8_v2) X(cuModuleGetGlobal_v2) X(cuModuleUnload) \
  X(cuMulticastAddDevice) X(cuMulticastBindMem) X(cuMulticastCreate) X(cuMulticastUnbind) X(cuPointerGetAttributes) \
  X(cuPointerSetAttribute) X(cuStreamBeginCapture) X(cuStreamDestroy) X(cuStreamEndCapture) X(cuStreamSynchronize) \
  X(cuStreamWaitEvent) X(cuStreamWaitValue64_v2) X(cuTensorMapEncodeIm2col) X(cuTensorMapEncodeTiled) \
  X(nvmlInit_v2) X(nvmlShutdown) X(nvmlDeviceGetComputeRunningProcesses_v3) X(nvmlDeviceGetMigMode) \
  X(nvmlDeviceGetCurrentClocksThrottleReasons) X(nvmlDeviceGetTotalEccErrors)
EACH(NOTHING)
