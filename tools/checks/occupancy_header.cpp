// Asks NVIDIA's cuda_occupancy.h about every case on standard input and prints its answers, one line each.
// Case: cc major, minor; threads/SM, registers/block, registers/SM, shared/SM, opt-in, reserve; threads, registers,
// static shared, dynamic shared, barriers, carve-out. Answer: status; limits of warps, blocks, registers, shared memory,
// barriers; active blocks; limiter mask; allocated shared bytes.
#include <climits>
#include <cstdio>

#include "cuda_occupancy.h"

int main() {
    cudaOccDeviceProp device;
    device.maxThreadsPerBlock = 1024;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    cudaOccDeviceState state;
    int threads;
    while (std::scanf("%d %d %d %d %d %zu %zu %zu %d %d %zu %zu %d %d", &device.computeMajor, &device.computeMinor,
                      &device.maxThreadsPerMultiprocessor, &device.regsPerBlock, &device.regsPerMultiprocessor,
                      &device.sharedMemPerMultiprocessor, &device.sharedMemPerBlockOptin,
                      &device.reservedSharedMemPerBlock, &threads, &kernel.numRegs, &kernel.sharedSizeBytes,
                      &kernel.maxDynamicSharedSizeBytes, &kernel.numBlockBarriers, &state.carveoutConfig) == 14) {
        cudaOccResult result = {};
        int status = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                             kernel.maxDynamicSharedSizeBytes);
        std::printf("%d %d %d %d %d %d %d %u %zu\n", status, result.blockLimitWarps, result.blockLimitBlocks,
                    result.blockLimitRegs, result.blockLimitSharedMem, result.blockLimitBarriers,
                    result.activeBlocksPerMultiprocessor, result.limitingFactors, result.allocatedSharedMemPerBlock);
    }
    return 0;
}
