// The CUDA runtime: memory is lazily zeroed host memory, kernels do nothing, all is logged.
#include <atomic>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
#define API extern "C" __attribute__((visibility("default")))
#define OK return cudaSuccess
#define GIVES(f, arguments, ...) \
  API cudaError_t f arguments {  \
    __VA_ARGS__;                 \
    OK;                          \
  }

static size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

// ---- the log: K kernel, G product, M copy, Z memset, C collective, Y D waits, A F H allocations,
// R record, W stream waits for event, J program for NVRTC, L graph launch, # mark
struct Event {
  char kind;
  const char* name;
  long a, b, c;
  void* stream;
  bool main_thread;
};
static std::mutex mutex;
static std::vector<Event> events;
static bool paused = false;
API void fake_log(char kind, const char* name, long a, long b, long c, void* stream) {
  if (paused) return;
  std::lock_guard<std::mutex> guard(mutex);
  events.push_back({kind, name, a, b, c, stream, syscall(SYS_gettid) == getpid()});
}
static void log(char kind, const char* name, long a = 0, long b = 0, long c = 0,
                void* stream = nullptr) {
  fake_log(kind, name, a, b, c, stream);
}
API void fake_mark(const char* text) { log('#', strdup(text)); }
API void fake_pause(int now) { paused = now; }
API void fake_reset() {
  std::lock_guard<std::mutex> guard(mutex);
  events.clear();
}
API void fake_dump(const char* path) {
  std::lock_guard<std::mutex> guard(mutex);
  FILE* file = fopen(path, "w");
  for (auto& e : events)
    fprintf(file, "%c\t%ld\t%ld\t%ld\t%ld\t%d\t%s\n", e.kind, e.a, e.b, e.c, (long)e.stream,
            e.main_thread, e.name ? e.name : "?");
  fclose(file);
}

// ---- graph capture: what its stream is given meanwhile counts in the graph and is not done; a wait
// by its thread or for its stream is an error. Other threads go on, as in mode thread_local.
static long captured = -1;  // operations of the graph being captured; -1: none is
static cudaStream_t capturing = nullptr;
static long capturing_thread = 0;
static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static bool in_capture(void* stream) { return captured >= 0 && stream == capturing; }
static bool forbids_waiting(void* stream) {
  bool own = captured >= 0 && syscall(SYS_gettid) == capturing_thread;
  return in_capture(stream) || (own && mode != cudaStreamCaptureModeRelaxed);
}
static void operation(char kind, const char* name, long a, long b, long c, void* stream) {
  if (in_capture(stream)) captured++;
  log(kind, name, a, b, c, stream);
}
static cudaError_t wait(char kind, const char* name, void* stream = nullptr) {
  if (forbids_waiting(stream)) return cudaErrorStreamCaptureUnsupported;
  log(kind, name, 0, 0, 0, stream);
  OK;
}
static cudaStreamCaptureStatus status(cudaStream_t stream) {
  return in_capture(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  captured = 0, capturing = s, capturing_thread = syscall(SYS_gettid);
  log('R', "cudaStreamBeginCapture", 0, 0, 0, s);
  OK;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  *graph = (cudaGraph_t)(captured + 1);
  log('R', "cudaStreamEndCapture", captured, 0, 0, s);
  captured = -1;
  OK;
}
GIVES(cudaStreamIsCapturing, (cudaStream_t s, cudaStreamCaptureStatus* c), *c = status(s))
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* c,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  *c = status(s);
  if (id) *id = 1;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  OK;
}
GIVES(cudaThreadExchangeStreamCaptureMode, (cudaStreamCaptureMode* other), std::swap(mode, *other))
GIVES(cudaGraphInstantiate, (cudaGraphExec_t* e, cudaGraph_t g, unsigned long long),
      *e = (cudaGraphExec_t)g)
GIVES(cudaGraphGetNodes, (cudaGraph_t g, cudaGraphNode_t*, size_t* count), *count = (long)g - 1)
GIVES(cudaGraphLaunch, (cudaGraphExec_t e, cudaStream_t s),
      log('L', "cudaGraphLaunch", (long)e - 1, 0, 0, s))

// ---- registration and launches
static std::unordered_map<const void*, const char*> kernels;
static const char* name_of(const void* f) {
  auto found = kernels.find(f);
  return found == kernels.end() ? "?" : found->second;
}
static long product(dim3 d) { return (long)d.x * d.y * d.z; }
static cudaError_t launch(const void* f, dim3 grid, dim3 block, size_t shared, void* stream) {
  operation('K', name_of(f), product(grid), product(block), (long)shared, stream);
  OK;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  kernels[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
static thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>> configurations;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  std::tie(*grid, *block, *shared, *(void**)stream) = configurations.back();
  configurations.pop_back();
  OK;
}
GIVES(__cudaGetKernel, (cudaKernel_t* kernel, const void* f), *kernel = (cudaKernel_t)f)
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void**, size_t m,
                                   cudaStream_t s) {
  return launch((const void*)k, g, b, m, s);
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t m,
                                 cudaStream_t s) {
  return launch(f, g, b, m, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  operation('K', "host function", 0, 0, 0, s);
  f(data);
  OK;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->maxDynamicSharedSizeBytes = 49152;
  a->binaryVersion = a->ptxVersion = 90;
  OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                              size_t) {
  *blocks = threads > 1024 ? 1 : threads ? 2048 / threads : 2;
  OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* f,
                                                                       int threads, size_t shared,
                                                                       unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared);
}

// ---- devices: H100s of 80 GiB, unless told otherwise
static size_t used_bytes = 0;
static size_t total_bytes() { return setting("FAKE_GIB", 80) << 30; }
static const size_t CONTEXT_BYTES = (size_t)600 << 20;
static thread_local int device = 0;
// NCCL's watchdog asks while Python changes the environment, where getenv may find nothing: what was
// found once stays
static int device_count() {
  static std::atomic<size_t> known{0};
  if (!known) known = setting("FAKE_DEVICES", 0);
  return known ? (int)known : 1;
}
GIVES(cudaGetDeviceCount, (int* n), *n = device_count())
GIVES(cudaGetDevice, (int* d), *d = device)
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) return cudaErrorInvalidDevice;
  device = d;
  OK;
}
GIVES(cudaDriverGetVersion, (int* v), *v = CUDART_VERSION)
GIVES(cudaRuntimeGetVersion, (int* v), *v = CUDART_VERSION)
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, getenv("FAKE_NAME") ? getenv("FAKE_NAME") : "NVIDIA H100 80GB HBM3");
  p->major = (int)setting("FAKE_MAJOR", 9);
  p->totalGlobalMem = total_bytes(), p->totalConstMem = 65536, p->l2CacheSize = 50 << 20;
  p->multiProcessorCount = 132, p->warpSize = 32, p->regsPerBlock = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472, p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32, p->memoryBusWidth = 5120, p->textureAlignment = 512;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1, p->asyncEngineCount = 3;
  OK;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int d) {
  static cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    default: *value = 1;
  }
  OK;
}
GIVES(cudaDeviceCanAccessPeer, (int* can, int, int), *can = 0)
GIVES(cudaDeviceGetPCIBusId, (char* id, int size, int d), snprintf(id, size, "0000:%02d:00.0", d))
GIVES(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), *least = 0, *greatest = -5)
API cudaError_t cudaDeviceSynchronize() { return wait('D', "cudaDeviceSynchronize"); }

// ---- memory
static std::map<char*, size_t> on_device, pinned;
static bool in(std::map<char*, size_t>& regions, const void* p) {
  auto after = regions.upper_bound((char*)p);
  if (after == regions.begin()) return false;
  --after;
  return (char*)p < after->first + after->second;
}
static void* take(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
static size_t give_back(std::map<char*, size_t>& regions, void* p) {
  auto found = regions.find((char*)p);
  if (found == regions.end()) return 0;
  size_t bytes = found->second;
  munmap(p, bytes);
  regions.erase(found);
  return bytes;
}
API cudaError_t cudaMalloc(void** p, size_t bytes) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (used_bytes + bytes + CONTEXT_BYTES > total_bytes()) return cudaErrorMemoryAllocation;
    *p = take(bytes);
    on_device[(char*)*p] = bytes;
    used_bytes += bytes;
  }
  log('A', "cudaMalloc", (long)bytes);
  OK;
}
API cudaError_t cudaFree(void* p) {
  if (!p) OK;
  {
    std::lock_guard<std::mutex> guard(mutex);
    used_bytes -= give_back(on_device, p);
  }
  log('F', "cudaFree");
  OK;
}
API cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  return cudaMalloc(p, bytes);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    *p = take(bytes);
    pinned[(char*)*p] = bytes;
  }
  log('H', "cudaHostAlloc", (long)bytes);
  OK;
}
API cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
API cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  give_back(pinned, p);
  OK;
}
API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(mutex);
  pinned[(char*)p] = bytes;
  OK;
}
API cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  pinned.erase((char*)p);
  OK;
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = total_bytes();
  *free_bytes = total_bytes() - used_bytes - CONTEXT_BYTES;
  OK;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  memset(a, 0, sizeof *a);
  a->type = in(on_device, p) ? cudaMemoryTypeDevice
            : in(pinned, p)  ? cudaMemoryTypeHost
                             : cudaMemoryTypeUnregistered;
  if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = (void*)p;
  if (a->type == cudaMemoryTypeHost) a->hostPointer = (void*)p;
  OK;
}
// What the next small copies to the host read, where no kernel has computed a length.
static long answer = 0;
static int answers = 0;
API void fake_answer(long value, int count) { answer = value, answers = count; }
static size_t filled_bytes() { return setting("FAKE_FILLED", 4 << 20); }  // larger ones: no more
static cudaError_t copy(void* to, const void* from, size_t bytes, bool async, cudaStream_t s) {
  bool to_device, from_device, is_pinned;
  {
    std::lock_guard<std::mutex> guard(mutex);
    to_device = in(on_device, to), from_device = in(on_device, from);
    is_pinned = in(pinned, to_device ? from : to);
  }
  if (!async && forbids_waiting(s)) return cudaErrorStreamCaptureUnsupported;
  const char* name = to_device ? (from_device ? "D2D" : "H2D") : (from_device ? "D2H" : "H2H");
  operation('M', name, (long)bytes, async, is_pinned || (to_device && from_device), s);
  if (in_capture(s)) OK;
  if (!to_device && answers > 0 && (bytes == 4 || bytes == 8)) {
    answers--;
    memcpy(to, &answer, bytes);
  } else {
    memcpy(to, from, to_device && bytes > filled_bytes() ? filled_bytes() : bytes);
  }
  OK;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  return copy(d, s, n, false, nullptr);
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind,
                                cudaStream_t stream) {
  return copy(d, s, n, true, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n,
                                    cudaStream_t stream) {
  return copy(d, s, n, true, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t to_pitch, const void* s, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind,
                                  cudaStream_t stream) {
  operation('M', "2D", (long)(width * height), 1, 0, stream);
  if (in_capture(stream)) OK;
  for (size_t i = 0; i < height; i++)
    memcpy((char*)d + i * to_pitch, (const char*)s + i * from_pitch, width);
  OK;
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s) {
  operation('Z', "memset", (long)bytes, 1, 0, s);
  if (!in_capture(s)) memset(p, value, bytes > filled_bytes() ? filled_bytes() : bytes);
  OK;
}
API cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  return cudaMemsetAsync(p, value, bytes, nullptr);
}
GIVES(cudaGetSymbolAddress, (void** p, const void*), *p = take(1 << 20))

// ---- streams and events: everything is done at once, so they are numbers
static uintptr_t fresh() {
  static uintptr_t last = 0x1000;
  std::lock_guard<std::mutex> guard(mutex);
  return last += 16;
}
GIVES(cudaStreamCreate, (cudaStream_t* s), *s = (cudaStream_t)fresh())
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  return cudaStreamCreate(s);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  return wait('Y', "cudaStreamSynchronize", s);
}
GIVES(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned),
      log('W', "cudaStreamWaitEvent", (long)e, 0, 0, s))
GIVES(cudaStreamGetPriority, (cudaStream_t, int* priority), *priority = 0)
GIVES(cudaEventCreate, (cudaEvent_t* e), *e = (cudaEvent_t)fresh())
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
GIVES(cudaEventRecord, (cudaEvent_t e, cudaStream_t s),
      log('R', "cudaEventRecord", (long)e, 0, 0, s))
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait('Y', "cudaEventSynchronize"); }
GIVES(cudaEventElapsedTime, (float* ms, cudaEvent_t, cudaEvent_t), *ms = 1)

// ---- errors
API const char* cudaGetErrorName(cudaError_t) { return "fakeError"; }
API const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorStreamCaptureUnsupported ? "a wait inside a graph capture" : "fake error";
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *f = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorSymbolNotFound;
}
