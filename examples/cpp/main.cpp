// Runs the model that export.py wrote: main PARAMETERS WIDTH ROWS

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "mlp.h"

static void check(int status)
{
    if (status) {
        std::fprintf(stderr, "main: %s\n", mlp_error_text(status));
        std::exit(1);
    }
}

static void *on_device(int64_t bytes)
{
    void *memory = nullptr;
    if (bytes)
        check(cudaMalloc(&memory, bytes));
    return memory;
}

int main(int count, char **arguments)
{
    if (count != 4) {
        std::fprintf(stderr, "usage: main PARAMETERS WIDTH ROWS\n");
        return 2;
    }
    const int64_t width = std::atoll(arguments[2]), rows = std::atoll(arguments[3]);
    const int64_t sizes[] = {rows};
    const int64_t bytes = mlp_workspace_bytes(sizes);
    check(bytes < 0 ? static_cast<int>(bytes) : 0);
    void *workspace = on_device(bytes);

    // x, then the parameters as mlp.h lists them, then the result; all in float16
    const std::vector<int64_t> elements = {
        rows * width, width, 2 * width * width, 2 * width * width, 2 * width * width, rows * width,
    };
    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<void *> tensors;
    for (int64_t n : elements)
        tensors.push_back(on_device(2 * n));
    for (size_t i = 1; i + 1 < elements.size(); i++) {
        std::vector<char> host(2 * elements[i]);
        if (!file.read(host.data(), host.size())) {
            std::fprintf(stderr, "main: %s is too short\n", arguments[1]);
            return 1;
        }
        check(cudaMemcpy(tensors[i], host.data(), host.size(), cudaMemcpyHostToDevice));
    }
    const std::vector<uint16_t> ones(elements[0], 0x3c00);  // 1.0 in float16
    check(cudaMemcpy(tensors[0], ones.data(), 2 * elements[0], cudaMemcpyHostToDevice));

    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    check(mlp_run(tensors.data(), sizes, workspace, stream));
    check(cudaStreamSynchronize(stream));
    std::printf("ran %d rows with a workspace of %d bytes\n", static_cast<int>(rows),
                static_cast<int>(bytes));

    for (void *memory : tensors)
        check(cudaFree(memory));
    check(cudaFree(workspace));
    check(cudaStreamDestroy(stream));
    return 0;
}
