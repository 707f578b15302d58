// What the launcher of the fused head calls of libcuda.so.1, for tests: kernels run in the emulation, one at a time.
//
// A device with four multiprocessors, each of which takes two blocks, and 227 KiB of shared memory for a block. The
// image of a module is not read, but for its first bytes. Memory of the device is memory of the process.

#include <map>
#include <set>
#include <string>

#include "kernels.h"

namespace {

enum { kInvalidValue = 1, kInvalidImage = 200, kInvalidHandle = 400, kNotFound = 500, kLaunchFailed = 719, kTooLarge = 720 };
constexpr int kMultiprocessors = 4, kBlocks = 2, kMaxThreads = 256;
constexpr size_t kShared = 48 << 10, kMaxShared = 227 << 10;  // without and with an attribute of the function

struct Function {
  std::string name;
  HeadKernel kernel;
  size_t shared;
};
struct Module {
  std::map<std::string, Function> functions;
};
std::set<Module *> modules;
std::string calls;  // objects of JSON with commas between

void record(const std::string &call, int error, const std::string &more = "") {
  if (!calls.empty()) calls += ", ";
  calls += "{\"call\": \"" + call + "\", \"error\": " + std::to_string(error) + more + "}";
}

Function *function_of(void *handle) {
  for (Module *module : modules) {
    for (auto &entry : module->functions) {
      if (&entry.second == handle) return &entry.second;
    }
  }
  return nullptr;
}

int start(const Function *function, bool cooperative, const unsigned *grid, const unsigned *block, unsigned shared,
          void **parameters) {
  if (!function) return kInvalidHandle;
  if (!grid[0] || !block[0] || block[0] > kMaxThreads || shared > function->shared || !parameters) return kInvalidValue;
  if (grid[1] * grid[2] * block[1] * block[2] != 1) return kInvalidValue;  // the kernels know one dimension
  if (cooperative && grid[0] > kBlocks * kMultiprocessors) return kTooLarge;
  const DsparkHeadArguments &arguments = *(const DsparkHeadArguments *)parameters[0];
  const int32_t first = *(const int32_t *)parameters[1], last = *(const int32_t *)parameters[2];
  const int error = emulation::launch(function->kernel, grid[0], block[0], shared, 0, arguments, first, last);
  return error ? kLaunchFailed : 0;
}

int recorded_launch(const char *call, void *handle, const unsigned *grid, const unsigned *block, unsigned shared,
                    void *stream, void **parameters) {
  const Function *function = function_of(handle);
  const bool cooperative = !std::strcmp(call, "cuLaunchCooperativeKernel");
  const int error = start(function, cooperative, grid, block, shared, parameters);
  record(call, error, ", \"kernel\": \"" + (function ? function->name : "") + "\", \"grid\": " + std::to_string(grid[0]) +
             ", \"block\": " + std::to_string(block[0]) + ", \"shared_bytes\": " + std::to_string(shared) +
             ", \"stream\": " + std::to_string((uintptr_t)stream) +
             (error ? "" : ", \"first\": " + std::to_string(*(const int32_t *)parameters[1]) +
                               ", \"last\": " + std::to_string(*(const int32_t *)parameters[2])));
  return error;
}

const std::map<int, std::pair<const char *, const char *>> kErrors = {
    {0, {"CUDA_SUCCESS", "no error"}},
    {kInvalidValue, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {kInvalidImage, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {kInvalidHandle, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {kNotFound, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {kLaunchFailed, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {kTooLarge, {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"}},
};

}  // namespace

// The calls since the last `fake_driver_clear`, a list in JSON. Launches have kernel, grid, block, shared_bytes and stream,
// and those that were run first and last phase.
EXPORTED const char *fake_driver_log() {
  static std::string list;
  list = "[" + calls + "]";
  return list.c_str();
}
EXPORTED void fake_driver_clear() { calls.clear(); }

EXPORTED int cuInit(unsigned) { return 0; }

EXPORTED int cuModuleLoadData(void **module, const void *image) {
  const int error = std::memcmp(image, "\x7f" "ELF", 4) ? kInvalidImage : 0;
  if (!error) *module = *modules.insert(new Module).first;
  record("cuModuleLoadData", error);
  return error;
}
EXPORTED int cuModuleUnload(void *module) {
  const int error = modules.erase((Module *)module) ? 0 : kInvalidHandle;
  if (!error) delete (Module *)module;
  record("cuModuleUnload", error);
  return error;
}
EXPORTED int cuModuleGetFunction(void **function, void *module, const char *name) {
  if (!modules.count((Module *)module)) return kInvalidHandle;
  const HeadKernel kernel = kernel_named(name);
  if (!kernel) return kNotFound;
  *function = &((Module *)module)->functions.insert({name, Function{name, kernel, kShared}}).first->second;
  return 0;
}

EXPORTED int cuFuncSetAttribute(void *handle, int attribute, int value) {
  Function *function = function_of(handle);
  if (!function) return kInvalidHandle;
  if (attribute != 8 || value < 0 || (size_t)value > kMaxShared) return kInvalidValue;  // of dynamic shared memory
  function->shared = std::max<size_t>(value, kShared);
  return 0;
}
EXPORTED int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *handle, int threads, size_t shared) {
  if (!function_of(handle)) return kInvalidHandle;
  *blocks = threads > kMaxThreads || shared > kMaxShared ? 0 : kBlocks;
  return 0;
}

EXPORTED int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters, void **) {
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return recorded_launch("cuLaunchKernel", function, grid, block, shared, stream, parameters);
}
EXPORTED int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       void *stream, void **parameters) {
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return recorded_launch("cuLaunchCooperativeKernel", function, grid, block, shared, stream, parameters);
}

EXPORTED int cuGetErrorName(int error, const char **name) {
  const auto found = kErrors.find(error);
  *name = found == kErrors.end() ? nullptr : found->second.first;
  return found == kErrors.end() ? kInvalidValue : 0;
}
EXPORTED int cuGetErrorString(int error, const char **text) {
  const auto found = kErrors.find(error);
  *text = found == kErrors.end() ? nullptr : found->second.second;
  return found == kErrors.end() ? kInvalidValue : 0;
}
