/* A CUDA runtime that launches nothing: it writes every launch as a line of JSON, or hands it to a
 * function of this process (`set_launch_handler`, see ptx/run.py).
 *
 * Built two ways: as libcudart_static.a for exported kernels, and together with the DSL's launch
 * runtime as libcute_dsl_runtime.so for kernels loaded through CuTe DSL. Output goes to the file
 * named by FAKE_CUDA_LOG. FAKE_CUDA_PARAMETERS holds parameter sizes, e.g. "16,24,4": with it the
 * bytes of each kernel parameter are written too. FAKE_CUDA_FAIL=<n> makes launches return n.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARED_LIMIT = 232448, COOPERATIVE = 2, CLUSTER = 4, PDL = 6, MAJOR = 75, MINOR = 76 };

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

/* extents: of grid, block and cluster */
typedef int (*handler)(const unsigned *extents, unsigned long long shared, int cooperative,
                       void **arguments);

static handler on_launch;

/* As set, or the one whose address is in FAKE_CUDA_HANDLER: exported libraries have a
 * runtime each, and show nothing of it. */
static handler current_handler(void)
{
    const char *address = getenv("FAKE_CUDA_HANDLER");
    return on_launch || !address ? on_launch : (handler)(size_t)strtoull(address, NULL, 0);
}

void set_launch_handler(handler given) { on_launch = given; }

static void write_parameters(FILE *out, void **arguments)
{
    const char *sizes = getenv("FAKE_CUDA_PARAMETERS");
    int index = 0;
    fprintf(out, "[");
    while (sizes && *sizes) {
        char *end;
        long i, size = strtol(sizes, &end, 10);
        fprintf(out, "%s\"", index ? ", " : "");
        for (i = 0; i < size; i++)
            fprintf(out, "%02x", ((unsigned char *)arguments[index])[i]);
        fprintf(out, "\"");
        index++;
        sizes = *end ? end + 1 : end;
    }
    fprintf(out, "]");
}

int cudaLaunchKernelExC(const launch_config *c, const void *kernel, void **arguments)
{
    unsigned cluster[3] = { 1, 1, 1 }, i;
    int pdl = 0, cooperative = 0;
    const char *path = getenv("FAKE_CUDA_LOG"), *fail = getenv("FAKE_CUDA_FAIL");
    FILE *out;
    if (fail)
        return atoi(fail);
    for (i = 0; i < c->count; i++) {
        const attribute *a = &c->attributes[i];
        if (a->id == CLUSTER)
            memcpy(cluster, a->value.cluster, sizeof cluster);
        else if (a->id == PDL)
            pdl = a->value.flag;
        else if (a->id == COOPERATIVE)
            cooperative = a->value.flag;
    }
    if (current_handler()) {
        const unsigned extents[9] = { c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                                      c->block[2], cluster[0], cluster[1], cluster[2] };
        return current_handler()(extents, c->shared, cooperative, arguments);
    }
    out = path ? fopen(path, "a") : NULL;
    if (!out)
        out = stdout;
    fprintf(out,
            "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
            "\"cluster\": [%u, %u, %u], \"smem\": %zu, \"pdl\": %s, \"cooperative\": %s, "
            "\"stream\": %llu, \"parameters\": ",
            (const char *)kernel, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
            c->block[2], cluster[0], cluster[1], cluster[2], c->shared, pdl ? "true" : "false",
            cooperative ? "true" : "false", (unsigned long long)(size_t)c->stream);
    write_parameters(out, arguments);
    fprintf(out, "}\n");
    if (out == stdout)
        fflush(out);
    else
        fclose(out);
    return 0;
}

int cudaLibraryLoadData(void **library, const void *code)
{
    *library = (void *)code;
    return 0;
}

int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    (void)library;
    *kernel = strdup(name);
    return 0;
}

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }

/* FAKE_CUDA_CAPABILITY=<n> is the compute capability, as 90; other attributes are the limit. */
int cudaDeviceGetAttribute(int *value, int attribute)
{
    const char *capability = getenv("FAKE_CUDA_CAPABILITY");
    int known = capability ? atoi(capability) : 90;
    *value = attribute == MAJOR ? known / 10 : attribute == MINOR ? known % 10 : SHARED_LIMIT;
    return 0;
}

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

/* Memory of the device is that of the host. Pointers that are only written down belong to nobody, so
 * a stream touches memory for a handler alone. */
int cudaMalloc(void **memory, size_t bytes) { return posix_memalign(memory, 256, bytes) ? 2 : 0; }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaMemcpy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes)
{
    if (current_handler())
        memcpy(to, from, bytes);
    return 0;
}
int cudaMemsetAsync(void *to, int value, size_t bytes)
{
    if (current_handler())
        memset(to, value, bytes);
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
NOTHING(cudaMallocAsync)
NOTHING(cudaMallocHost)
NOTHING(cudaMallocManaged)
NOTHING(cudaMemcpy3D)
NOTHING(cudaMemcpy3DAsync)
NOTHING(cudaMemset)
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
