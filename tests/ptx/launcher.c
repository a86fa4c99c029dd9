/* A CUDA runtime that hands every launch to a function of this process, see run.py.
 *
 * Built together with the DSL's launch runtime as libcute_dsl_runtime.so.
 */
#include <stdint.h>
#include <string.h>

enum { SHARED_LIMIT = 232448, COOPERATIVE = 2, CLUSTER = 4 };

typedef struct {
    int id;
    char padding[4];
    union { int flag; unsigned cluster[3]; char bytes[64]; } value;
} attribute;

typedef struct {
    unsigned grid[3], block[3];
    size_t shared;
    void *stream;
    attribute *attributes;
    unsigned count;
} launch_config;

typedef int (*handler)(const uint32_t *extents, uint64_t shared, int cooperative, void **arguments);

static handler on_launch;

void set_launch_handler(handler given) { on_launch = given; }

int cudaLaunchKernelExC(const launch_config *c, const void *kernel, void **arguments)
{
    uint32_t extents[9] = { c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                            c->block[2], 1, 1, 1 };
    int cooperative = 0;
    (void)kernel;
    for (unsigned i = 0; i < c->count; i++) {
        const attribute *a = &c->attributes[i];
        if (a->id == CLUSTER)
            memcpy(extents + 6, a->value.cluster, sizeof a->value.cluster);
        else if (a->id == COOPERATIVE)
            cooperative = a->value.flag;
    }
    return on_launch ? on_launch(extents, c->shared, cooperative, arguments) : 999;
}

int cudaLibraryLoadData(void **library, const void *code)
{
    *library = (void *)code;
    return 0;
}

int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    (void)library;
    *kernel = (void *)name;
    return 0;
}

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDeviceGetAttribute(int *value) { *value = SHARED_LIMIT; return 0; }
const char *cudaGetErrorString(int status) { return status ? "fake failure" : "no error"; }
const char *cudaGetErrorName(int status) { return status ? "cudaErrorFake" : "cudaSuccess"; }

/* Driver entry points are only used to ask a kernel for its static shared memory: the functions
 * that take (int *value, ...) get a zero. */
static int driver_stub(int *value) { *value = 0; return 0; }

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *found)
{
    (void)name, (void)version, (void)flags;
    *function = (void *)driver_stub;
    if (found)
        *found = 0;
    return 0;
}

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaDriverGetVersion)
NOTHING(cudaEventCreate)
NOTHING(cudaEventCreateWithFlags)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventQuery)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaEventSynchronize)
NOTHING(cudaFree)
NOTHING(cudaFreeAsync)
NOTHING(cudaFreeHost)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaGetDeviceProperties)
NOTHING(cudaGetDeviceProperties_v2)
NOTHING(cudaGetDriverEntryPoint)
NOTHING(cudaGetLastError)
NOTHING(cudaGraphAddKernelNode)
NOTHING(cudaGraphCreate)
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
NOTHING(cudaGraphInstantiate)
NOTHING(cudaGraphKernelNodeGetAttribute)
NOTHING(cudaGraphKernelNodeSetAttribute)
NOTHING(cudaGraphLaunch)
NOTHING(cudaKernelSetAttributeForDevice)
NOTHING(cudaLibraryGetGlobal)
NOTHING(cudaLibraryGetKernelCount)
NOTHING(cudaLibraryGetManaged)
NOTHING(cudaLibraryGetUnifiedFunction)
NOTHING(cudaLibraryLoadFromFile)
NOTHING(cudaLibraryUnload)
NOTHING(cudaMalloc)
NOTHING(cudaMallocAsync)
NOTHING(cudaMallocHost)
NOTHING(cudaMallocManaged)
NOTHING(cudaMemcpy)
NOTHING(cudaMemcpy3D)
NOTHING(cudaMemcpy3DAsync)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemset)
NOTHING(cudaMemsetAsync)
NOTHING(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
NOTHING(cudaSetDevice)
NOTHING(cudaStreamAddCallback)
NOTHING(cudaStreamBeginCapture)
NOTHING(cudaStreamCreate)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamEndCapture)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)

/* The one function of libcute_dsl_runtime.so beyond the launch runtime that TVM-FFI objects use. */
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int status)
{
    const char *parts[] = { cudaGetErrorString(status) };
    raise("RuntimeError", parts, 1);
}
