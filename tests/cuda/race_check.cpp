// Runs blocks of random contents in the emulation for the thread sanitizer, which reports what no barrier puts in order.
//
// Arguments: kernel, kind (0 vanilla, 1 gated, 2 rnn), rows, positions, vocabulary, rank, blocks, warps of a block, schedule.
// Returns 0, an error of emulation.h, 9 where arguments are wrong, or the sanitizer's code.

#include "kernels.h"

namespace {

struct Numbers {  // arrays of the dtype of the kernel
  int item;
  emulation::Random random{7};

  void *array(int64_t count) {
    void *made = zeros(count * item);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = dspark::to_bits((int)(random() % 65) / 64.0f - 0.5f);
      if (item == 4) ((uint32_t *)made)[i] = bits;
      if (item == 2) ((uint16_t *)made)[i] = (uint16_t)(bits >> 16);  // in fp16 some other number
    }
    return made;
  }
  int64_t *integers(int64_t count) { return (int64_t *)zeros(8 * count); }
  void *zeros(int64_t bytes) { return new uint4[bytes / 16 + 1](); }  // to the end of the process
};

}  // namespace

int main(int count, char **arguments) {
  const HeadKernel kernel = count == 10 ? kernel_named(arguments[1]) : nullptr;
  if (!kernel) return 9;
  int64_t numbers[8];
  for (int i = 0; i < 8; ++i) numbers[i] = std::atoll(arguments[i + 2]);
  const int64_t kind = numbers[0], rows = numbers[1], positions = numbers[2], vocabulary = numbers[3], rank = numbers[4];
  const int64_t blocks = numbers[5], warps = numbers[6], schedule = numbers[7], hidden_size = 8;
  const int dtype = std::strstr(arguments[1], "fp32") ? 0 : std::strstr(arguments[1], "bf16") ? 1 : 2;
  const int tiles = arguments[1][std::strlen(arguments[1]) - 1] - '0';

  Numbers make{dtype ? 2 : 4};
  DsparkHeadArguments a = {};
  a.rows = rows;
  a.positions = positions;
  a.vocabulary = a.target_vocabulary = vocabulary;
  a.rank = rank;
  a.hidden_size = hidden_size;
  a.hidden_row_stride = positions * hidden_size;
  a.mixer_row_stride = (kind == 2 ? 2 : 1) * rank;
  a.base = make.array(rows * positions * vocabulary);
  a.hidden = make.array(rows * positions * hidden_size);
  a.anchors = make.integers(rows);
  a.w1 = make.array(vocabulary * rank);
  a.w2 = make.array(vocabulary * rank);
  a.mixer_weight = make.array(3 * rank * 2 * rank);
  a.mixer_hidden = make.array(rows * positions * 3 * rank);
  a.confidence_weight = make.array(hidden_size + rank);
  a.confidence_bias = make.array(1);
  a.confidence_reads_tokens = 1;
  a.logits = make.array(rows * positions * vocabulary);
  a.columns = make.integers(rows * positions);
  a.tokens = make.integers(rows * positions);
  a.confidence = (float *)make.integers(rows * positions);
  a.scratch = make.integers(1 + rows * positions + 2 * rows * rank);
  a.kind = (int32_t)kind;
  a.dtype = dtype;
  a.aligned = rank * make.item % 16 == 0;

  const int64_t tile = dtype ? 8 * tiles : 4, pitch = (rank * make.item + 127) / 128 * 128 + 64;
  const int32_t phases = (int32_t)(positions * (kind ? 2 : 1) + 1);
  return emulation::launch(kernel, blocks, 32 * warps, tile * (8 * warps + 8 + pitch), schedule, a, 0, phases);
}
