/* What Triton calls of libcuda when it loads and launches kernels: every call succeeds and does nothing. */
#include <stddef.h>

int cuGetErrorString(int code, const char **text) { *text = "none"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
  *(unsigned long long *)value = pointer;
  return 0;
}
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return 0; }
