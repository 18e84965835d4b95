// Prints what the device is, as JSON. Exit status 3 where there is none.
#include "files.cuh"

int main() {
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) stop("no CUDA device", cudaGetErrorString(error), EXIT_NOT_HERE);
    if (!count) stop("no CUDA device", "none found", EXIT_NOT_HERE);
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    std::printf("{\"name\": \"%s\", \"capability\": \"%d.%d\", ", device.name, device.major, device.minor);
    std::printf("\"driver_cuda\": \"%d.%d\", ", driver / 1000, driver % 1000 / 10);
    std::printf("\"runtime_cuda\": \"%d.%d\"}\n", runtime / 1000, runtime % 1000 / 10);
    return 0;
}
