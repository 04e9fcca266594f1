/* cuBLAS, cuBLASLt, cuDNN, NVRTC and libcuda: what torch reads back; one library for each name that
   the compiler is told. Callers pass more arguments than are named, which C allows on all ABIs used.
   Every other function of the real library returns 0 (build.py). */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
void fake_log(char kind, const char* name, long a, long b, long c, void* stream);
static int handle;
#define HANDLE(f) int f(void** made) { *made = &handle; return 0; }

#ifdef CUBLAS
static int math_mode; /* 3: TF32 */
HANDLE(cublasCreate_v2)
int cublasSetMathMode(void* h, int mode) { math_mode = mode; return 0; }
int cublasGetMathMode(void* h, int* mode) { *mode = math_mode; return 0; }
int cublasGetPointerMode_v2(void* h, int* mode) { *mode = 0; return 0; }
#define GEMM(f)                                                                \
  int f(void* h, int ta, int tb, int m, int n, int k) {                        \
    fake_log('G', #f, (long)m * n, k, math_mode == 3, 0);                      \
    return 0;                                                                  \
  }
GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasHgemm) GEMM(cublasSgemmEx) GEMM(cublasGemmEx)
GEMM(cublasGemmStridedBatchedEx) GEMM(cublasSgemmStridedBatched) GEMM(cublasDgemmStridedBatched)
GEMM(cublasHgemmStridedBatched)
int cublasSgemv_v2(void* h, int t, int m, int n) { fake_log('G', "cublasSgemv_v2", m, n, math_mode == 3, 0); return 0; }
int cublasDgemv_v2(void* h, int t, int m, int n) { fake_log('G', "cublasDgemv_v2", m, n, math_mode == 3, 0); return 0; }
int cublasDdot_v2(void* h, int n) { fake_log('G', "cublasDdot_v2", n, 1, 0, 0); return 0; }
int cublasSdot_v2(void* h, int n) { fake_log('G', "cublasSdot_v2", n, 1, 0, 0); return 0; }
#endif

#ifdef CUBLASLT
size_t cublasLtGetVersion(void) { return 130200; }
static int compute_type; /* of the description made last; 77: CUBLAS_COMPUTE_32F_FAST_TF32 */
int cublasLtMatmulDescCreate(void** made, int compute) { *made = &handle; compute_type = compute; return 0; }
HANDLE(cublasLtMatmulPreferenceCreate)
HANDLE(cublasLtMatrixLayoutCreate)
HANDLE(cublasLtCreate)
/* of the heuristics' array only "how many" is read, and each one's state, 0 */
int cublasLtMatmulAlgoGetHeuristic(void* h, void* d, void* a, void* b, void* c, void* e, void* p, int wanted, void* results, int* found) {
  memset(results, 0, 96);
  *found = 1;
  return 0;
}
int cublasLtMatmul(void) { fake_log('G', "cublasLtMatmul", 0, 0, compute_type == 77, 0); return 0; }
#endif

#ifdef CUDNN
size_t cudnnGetVersion(void) { return CUDNN; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(int status) { return "fake cuDNN"; }
int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? CUDNN / 10000 : which == 1 ? CUDNN / 100 % 100 : CUDNN % 100;
  return 0;
}
HANDLE(cudnnCreate) HANDLE(cudnnCreateTensorDescriptor) HANDLE(cudnnCreateFilterDescriptor)
HANDLE(cudnnCreateActivationDescriptor) HANDLE(cudnnCreatePoolingDescriptor)
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* h, int mode, int ops, void* x, void* z, void* y, void* p, void* act, size_t* bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* h, int mode, int ops, void* x, void* y, void* dy, void* dz, void* dx, void* p, void* act, size_t* bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* h, int mode, int ops, void* act, void* x, size_t* bytes) { *bytes = 0; return 0; }
#define LAYER(f) int f(void) { fake_log('K', #f, 0, 0, 0, 0); return 0; }
LAYER(cudnnBatchNormalizationForwardTrainingEx) LAYER(cudnnBatchNormalizationBackwardEx)
LAYER(cudnnBatchNormalizationForwardInference)
#endif

#ifdef NVRTC
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void** made, const char* source) { *made = &handle; fake_log('J', "nvrtcCreateProgram", (long)strlen(source), 0, 0, 0); return 0; }
static int size(size_t* bytes) { *bytes = 64; return 0; }
static int nothing(char* out) { memset(out, 0, 64); return 0; }
int nvrtcGetPTXSize(void* p, size_t* bytes) { return size(bytes); }
int nvrtcGetCUBINSize(void* p, size_t* bytes) { return size(bytes); }
int nvrtcGetPTX(void* p, char* out) { return nothing(out); }
int nvrtcGetCUBIN(void* p, char* out) { return nothing(out); }
int nvrtcGetProgramLogSize(void* p, size_t* bytes) { *bytes = 1; return 0; }
int nvrtcGetLoweredName(void* p, const char* expression, const char** name) { *name = "kernel"; return 0; }
const char* nvrtcGetErrorString(int e) { return "fake NVRTC"; }
#endif

#ifdef CUDA
int cuCtxGetCurrent(void** context) { *context = &handle; return 0; }
/* the numbers of both enumerations are the same; Triton refuses kernels by the shared memory */
int cuDeviceGetAttribute(int* value, int attribute, int d) {
  int (*of_runtime)(int*, int, int) = (int (*)(int*, int, int))dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
  return of_runtime ? of_runtime(value, attribute, d) : 500;
}
int cuDeviceGetCount(int* n) { *n = 1; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuFuncGetAttribute(int* value) { *value = 1024; return 0; }
int cuGetErrorString(int e, const char** text) { *text = "fake"; return 0; }
int cuGetErrorName(int e, const char** text) { *text = "fake"; return 0; }
int cuGetProcAddress_v2(const char* name, void** f) { *f = dlsym(RTLD_DEFAULT, name); return *f ? 0 : 500; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks) { *blocks = 2; return 0; }
HANDLE(cuModuleLoadData)
int cuModuleGetFunction(void** made, void* module, const char* name) { *made = strdup(name); return 0; }
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream) {
  fake_log('K', f, (long)gx * gy * gz, (long)bx * by * bz, shared, stream);
  return 0;
}
/* Triton's */
struct configuration { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; };
int cuLaunchKernelEx(const struct configuration* c, void* f) { return cuLaunchKernel(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream); }
#endif
