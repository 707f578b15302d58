// The kernels of DSPARK_KERNEL_SOURCE on a CPU, by their names.

#pragma once

#include DSPARK_KERNEL_SOURCE

#define EXPORTED extern "C" __attribute__((visibility("default")))

typedef void (*HeadKernel)(const DsparkHeadArguments, int32_t, int32_t);
struct NamedKernel {
  const char *name;
  HeadKernel kernel;
};

#define NAMED(dtype, tiles) {"dspark_head_" #dtype "_" #tiles, dspark_head_##dtype##_##tiles}
#define NAMED_OF(dtype, tiles) NAMED(dtype, tiles)
static const NamedKernel kKernels[] = {
#ifdef DSPARK_ONLY_DTYPE
    NAMED_OF(DSPARK_ONLY_DTYPE, DSPARK_ONLY_TILES),
#else
    NAMED(fp32, 1), NAMED(bf16, 1), NAMED(bf16, 2), NAMED(bf16, 8), NAMED(fp16, 1), NAMED(fp16, 2), NAMED(fp16, 8),
#endif
};

static HeadKernel kernel_named(const char *name) {
  for (const NamedKernel &each : kKernels) {
    if (!std::strcmp(each.name, name)) return each.kernel;
  }
  return nullptr;
}
