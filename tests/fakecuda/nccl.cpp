// Collectives that really move and add numbers between the ranks, through shared memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>

#include <nccl.h>
#define API extern "C" __attribute__((visibility("default")))
#define GIVES(f, arguments, ...)   \
  API ncclResult_t f arguments {   \
    __VA_ARGS__;                   \
    return ncclSuccess;            \
  }
#define REFUSES(f, arguments) \
  API ncclResult_t f arguments { return ncclInvalidUsage; }
extern "C" void fake_log(char, const char*, long, long, long, void*);

static const int MOST_RANKS = 8, WAIT_S = 60;
static const size_t CHUNK_BYTES = 1 << 20;
struct Shared {  // zero at first
  std::atomic<long> arrived[MOST_RANKS];
  char call[MOST_RANKS][64];
  char chunk[MOST_RANKS][CHUNK_BYTES];
};
struct Communicator {
  Shared* shared;
  int rank, ranks;
  long turn = 0;
  std::mutex mutex;

  void meet(const char* name) {  // until all ranks have come
    shared->arrived[rank] = ++turn;
    auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; r++)
      while (shared->arrived[r] < turn) {
        usleep(50);
        if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(WAIT_S)) {
          fprintf(stderr, "fake NCCL: rank %d waits for rank %d in %s\n", rank, r, name);
          abort();
        }
      }
  }
  void same(const char* name, size_t count, int type) {  // or the ranks are out of step
    snprintf(shared->call[rank], 64, "%s of %zu numbers of type %d", name, count, type);
    meet(name);
    for (int r = 0; r < ranks; r++)
      if (strcmp(shared->call[r], shared->call[rank])) {
        fprintf(stderr, "fake NCCL: rank %d: %s; rank %d: %s\n", rank, shared->call[rank], r,
                shared->call[r]);
        abort();
      }
    meet(name);
  }
};

GIVES(ncclGetVersion, (int* v), *v = NCCL_VERSION_CODE)
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf((char*)id, sizeof *id, "/fake-nccl-%08x%08x", std::random_device()(), (int)getpid());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t*) {
  int file = shm_open((const char*)&id, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ranks > MOST_RANKS || ftruncate(file, sizeof(Shared))) return ncclSystemError;
  auto* area = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto* made = new Communicator{(Shared*)area, rank, ranks};
  made->meet("init");
  shm_unlink((const char*)&id);
  *c = (ncclComm_t)made;
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(c, ranks, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int ranks, int rank, int, ncclUniqueId* id,
                                          ncclConfig_t*) {
  return ncclCommInitRankConfig(c, ranks, *id, rank, nullptr);
}
GIVES(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t* e), *e = ncclSuccess)
GIVES(ncclCommCount, (const ncclComm_t c, int* n), *n = ((Communicator*)c)->ranks)
GIVES(ncclCommUserRank, (const ncclComm_t c, int* n), *n = ((Communicator*)c)->rank)
GIVES(ncclCommCuDevice, (const ncclComm_t, int* n),
      *n = getenv("LOCAL_RANK") ? atoi(getenv("LOCAL_RANK")) : 0)
API const char* ncclGetErrorString(ncclResult_t) { return "fake NCCL does not do this"; }
API const char* ncclGetLastError(ncclComm_t) { return "fake NCCL does not do this"; }
REFUSES(ncclCommSplit, (ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*))
REFUSES(ncclSend, (const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t))
REFUSES(ncclReduce, (const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t,
      cudaStream_t))
REFUSES(ncclRecv, (void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t))

struct Bfloat16 {
  uint16_t bits;
  Bfloat16(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
};
static size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 4;
  }
}
template <class T>
static void combine(T* out, const T* x, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++)
    out[i] = op == ncclMax ? std::max(out[i], x[i]) : op == ncclMin ? std::min(out[i], x[i])
             : op == ncclProd ? T(out[i] * x[i])
                              : T(out[i] + x[i]);
}
template <class T>
static void reduce(Shared* s, int ranks, void* out, size_t count, ncclRedOp_t op) {
  memcpy(out, s->chunk[0], count * sizeof(T));
  for (int r = 1; r < ranks; r++) combine((T*)out, (const T*)s->chunk[r], count, op);
  if (op == ncclAvg)
    for (size_t i = 0; i < count; i++) ((T*)out)[i] = T(((T*)out)[i] / T(ranks));
}
static void reduce(Shared* s, int ranks, void* out, size_t n, ncclDataType_t t, ncclRedOp_t op) {
  switch (t) {
    case ncclInt8: return reduce<int8_t>(s, ranks, out, n, op);
    case ncclUint8: return reduce<uint8_t>(s, ranks, out, n, op);
    case ncclInt32: return reduce<int32_t>(s, ranks, out, n, op);
    case ncclInt64: return reduce<int64_t>(s, ranks, out, n, op);
    case ncclFloat32: return reduce<float>(s, ranks, out, n, op);
    case ncclFloat64: return reduce<double>(s, ranks, out, n, op);
    case ncclBfloat16: return reduce<Bfloat16>(s, ranks, out, n, op);
    case ncclFloat16: return reduce<_Float16>(s, ranks, out, n, op);
    default: fprintf(stderr, "fake NCCL: no sums of type %d\n", t), abort();
  }
}
// In chunks: each rank shows a part of what it sends, all come, each takes what it wants.
template <class Take>
static ncclResult_t collective(const char* name, const void* send, size_t n, ncclDataType_t t,
                               ncclComm_t comm, Take take) {
  auto& c = *(Communicator*)comm;
  std::lock_guard<std::mutex> guard(c.mutex);
  c.same(name, n, t);
  for (size_t at = 0; at < n * width(t); at += CHUNK_BYTES) {
    size_t bytes = std::min(CHUNK_BYTES, n * width(t) - at);
    memcpy(c.shared->chunk[c.rank], (const char*)send + at, bytes);
    c.meet(name);
    take(c, at, bytes);
    c.meet(name);
  }
  return ncclSuccess;
}
API ncclResult_t ncclAllReduce(const void* send, void* out, size_t n, ncclDataType_t t,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  fake_log('C', "ncclAllReduce", (long)n, t, 0, (void*)stream);
  return collective("ncclAllReduce", send, n, t, comm,
                    [&](Communicator& c, size_t at, size_t bytes) {
                      reduce(c.shared, c.ranks, (char*)out + at, bytes / width(t), t, op);
                    });
}
API ncclResult_t ncclBroadcast(const void* send, void* out, size_t n, ncclDataType_t t, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  fake_log('C', "ncclBroadcast", (long)n, t, 0, (void*)stream);
  return collective("ncclBroadcast", send, n, t, comm,
                    [&](Communicator& c, size_t at, size_t bytes) {
                      memcpy((char*)out + at, c.shared->chunk[root], bytes);
                    });
}
API ncclResult_t ncclBcast(void* buffer, size_t n, ncclDataType_t t, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, n, t, root, comm, stream);
}
API ncclResult_t ncclAllGather(const void* send, void* out, size_t n, ncclDataType_t t,
                               ncclComm_t comm, cudaStream_t stream) {
  fake_log('C', "ncclAllGather", (long)n, t, 0, (void*)stream);
  return collective("ncclAllGather", send, n, t, comm,
                    [&](Communicator& c, size_t at, size_t bytes) {
                      for (int r = 0; r < c.ranks; r++)
                        memcpy((char*)out + r * n * width(t) + at, c.shared->chunk[r], bytes);
                    });
}
API ncclResult_t ncclReduceScatter(const void* send, void* out, size_t n, ncclDataType_t t,
                                   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  fake_log('C', "ncclReduceScatter", (long)n, t, 0, (void*)stream);
  auto result = ncclSuccess;
  for (int root = 0; root < ((Communicator*)comm)->ranks && result == ncclSuccess; root++)
    result = collective("ncclReduceScatter", (const char*)send + root * n * width(t), n, t, comm,
                        [&](Communicator& c, size_t at, size_t bytes) {
                          if (c.rank == root)
                            reduce(c.shared, c.ranks, (char*)out + at, bytes / width(t), t, op);
                        });
  return result;
}
