// The fused head on a CPU, called by tests.

#include "kernels.h"

// Several phases are a cooperative launch. Returns 0 or an error of emulation.h; -1 where there is no such kernel.
EXPORTED int emulate_head(const DsparkHeadArguments *arguments, int dtype, int tiles, int first_phase, int last_phase,
                          int blocks, int threads, int shared_bytes, unsigned schedule) {
  static const char *const dtypes[] = {"fp32", "bf16", "fp16"};
  char name[32];
  std::snprintf(name, sizeof(name), "dspark_head_%s_%d", dtypes[dtype], tiles);
  const HeadKernel kernel = kernel_named(name);
  if (!kernel) return -1;
  return emulation::launch(kernel, blocks, threads, shared_bytes, schedule, *arguments, first_phase, last_phase);
}

// Words of the generator, for its table of known answers.
EXPORTED void emulate_philox(uint64_t seed, const uint32_t *counter, uint32_t *words) {
  const dspark::Words found = dspark::philox(seed, counter[0], counter[1], counter[2], counter[3]);
  for (int i = 0; i < 4; ++i) words[i] = found.word[i];
}

EXPORTED float emulate_gumbel(uint32_t word) { return dspark::gumbel(word); }
