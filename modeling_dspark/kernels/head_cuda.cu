// The sequential head of a DSpark drafter on a GPU: a whole block in one cooperative launch.
//
// A position is one phase (vanilla) or two (gated, rnn: the latent first), with a barrier of the whole grid between phases;
// where a cooperative launch is not possible, every phase is a launch of its own with the same body. In a phase each warp
// takes sixteen columns of W2 at a time and multiplies them with the latents of up to 64 rows: by tensor cores for bf16
// and fp16, by ordinary instructions, four rows at a time, for fp32. Loads of W2 are 16 bytes wide. Odd positions go through
// W2 backwards, and so find the part that was read last in the L2 cache.
//
// Memory traffic of a position, in bytes: W2 once (vocabulary * rank * size of a weight; once for each 64 rows, in fp32 for each
// four), base logits once (rows * vocabulary * size), the same again for the corrected logits if they are asked for, and
// from L2 one row of W1 for each row and block of the grid. All else is small. The floor is the first of these over the
// bandwidth of the memory.
//
// Tokens are chosen by the logits as rounded to the dtype of the weights: the highest, ties to the lowest column, or the
// highest of `logit / temperature + Gumbel noise`, with noise from Philox 4x32-10. Sums are in fp32. The sum for a logit is
// taken in the same order whatever the grid, so results do not depend on it.
//
// No header is needed, so nvcc and NVRTC compile it alike; tests run the same source on a CPU (DSPARK_EMULATION).

#if defined(DSPARK_EMULATION)
#include "emulation.h"
#elif defined(__CUDACC_RTC__)
typedef signed int int32_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef signed long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cuda_runtime.h>

#include <cstdint>
#endif

// Mirrored by `HeadArguments` in fused_launch.py. Arrays are contiguous, but for the strides given in elements.
struct DsparkHeadArguments {
  int64_t rows, positions, vocabulary, target_vocabulary, rank, hidden_size;
  int64_t hidden_row_stride;  // of `hidden`, whose positions are contiguous
  int64_t mixer_row_stride;   // of `mixer_weight`
  const void *base;           // [rows, positions, vocabulary]
  const void *hidden;         // [rows, positions, hidden_size]
  const int64_t *anchors;     // [rows], tokens of the target
  const void *w1;             // [target vocabulary, rank]
  const void *w2;             // [vocabulary, rank]
  const void *mixer_weight;   // its part for W1[previous] (gated, [rank, rank]) or [state; W1[previous]] (rnn, [3 rank, 2 rank])
  const void *mixer_hidden;   // [rows, positions, rank or 3 rank]: the rest of that linear layer, from `hidden` and its bias
  const void *confidence_weight, *confidence_bias;  // [hidden_size (+ rank)] and [1], or null
  const int64_t *draft_to_target;                   // [vocabulary], or null: what to add to a column
  void *logits;                                     // [rows, positions, vocabulary], or null if not requested
  int64_t *columns, *tokens;                        // [rows, positions]
  float *confidence;                                // [rows, positions]
  void *scratch;  // zeros: a counter of 8 bytes, keys [rows, positions] of 8; then floats: latents [rows, rank], states [2, rows, rank]
  double temperature;  // 0: the highest logit
  uint64_t seed;
  int32_t kind;                     // 0 vanilla, 1 gated, 2 rnn
  int32_t confidence_reads_tokens;  // whether `confidence_weight` has a part for W1[previous]
  int32_t dtype;                    // 0 fp32, 1 bf16, 2 fp16
  int32_t isa;                      // of the CPU; not used here
  int32_t threads;                  // of the CPU; not used here
  int32_t aligned;                  // whether rows of W1 and W2 are whole vectors of 16 bytes
};

namespace dspark {

typedef DsparkHeadArguments Arguments;
typedef unsigned long long Key;  // orders candidates: the higher logit, and of equal ones the lower column
enum Kind { kVanilla, kGated, kRnn };
constexpr int kLanes = 32, kColumns = 16;  // threads of a warp, and columns of W2 that it takes at a time
constexpr int kFloatRows = 4;              // rows that are multiplied at a time in fp32
constexpr uint32_t kAllLanes = 0xffffffffu;

#if !defined(DSPARK_EMULATION)
// Reads past the L1 cache, because another block may have written the value.
template <typename T>
__device__ T load_now(const T *source) {
  return *(const volatile T *)source;
}
__device__ inline void spin() {}
#define DSPARK_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// ------------------------------------------------------------------------------------------------------- numbers

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

__device__ inline float from_bits(uint32_t bits) {
  union { uint32_t bits; float value; } both;
  both.bits = bits;
  return both.value;
}
__device__ inline uint32_t to_bits(float value) {
  union { uint32_t bits; float value; } both;
  both.value = value;
  return both.bits;
}

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(bf16 value) { return from_bits((uint32_t)value.bits << 16); }
__device__ inline float widen(fp16 value) {
  const uint32_t sign = (uint32_t)(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest << 13));          // infinite or not a number
  return from_bits(sign | to_bits(from_bits(rest << 13) * from_bits(0x77800000)));  // times 2^112; right for subnormals
}

template <typename T>
__device__ T narrow(float value);  // to nearest, ties to even
template <>
__device__ inline float narrow<float>(float value) {
  return value;
}
template <>
__device__ inline bf16 narrow<bf16>(float value) {
  const uint32_t bits = to_bits(value);
  if (value != value) return bf16{0x7fc0};
  return bf16{(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
__device__ inline fp16 narrow<fp16>(float value) {
  const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return fp16{(uint16_t)(sign | 0x7e00)};
  if (rest >= 0x477ff000) return fp16{(uint16_t)(sign | 0x7c00)};  // 65520 and more
  if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded digits at the end of the fraction
    return fp16{(uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000))};
  }
  return fp16{(uint16_t)(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13))};
}

__device__ inline float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// Four words that depend on seed and counter alone (Salmon et al. 2011).
struct Words {
  uint32_t word[4];
};
__device__ inline Words philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = 0xD2511F53ull * c0, second = 0xCD9E8D57ull * c2;
    c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)second;
    c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// Gumbel noise. Small words make the high values that win, so words are kept to the last bit there.
__device__ inline float gumbel(uint32_t word) {
  float level = ((float)word + 0.5f) * from_bits(0x2f800000);  // times 2^-32
  level = fminf(level, from_bits(0x3f7fffff));  // large words round to 1, whose noise would be that of a weight of zero
  return -logf(-log1pf(-level));
}

// Never zero, which stands for no candidate. What is not a number loses to all others.
__device__ inline Key key_of(float value, uint32_t column) {
  const uint32_t bits = to_bits(value + 0.0f);  // -0 becomes 0, its equal
  const uint32_t order = value != value ? 0 : (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
  return ((Key)order << 32) | (0xffffffffu - column);
}
__device__ inline int64_t column_of(Key key) { return (int64_t)(0xffffffffu - (uint32_t)key); }
__device__ inline Key higher(Key a, Key b) { return a > b ? a : b; }

// --------------------------------------------------------------------------------------------- threads and memory

__device__ inline int lane_id() { return threadIdx.x % kLanes; }
__device__ inline int warp_id() { return threadIdx.x / kLanes; }
__device__ inline int warps_of_block() { return blockDim.x / kLanes; }

__device__ inline uint32_t *counter_of(const Arguments &a) { return (uint32_t *)a.scratch; }
__device__ inline Key *key_at(const Arguments &a, int64_t row, int64_t position) {
  return (Key *)a.scratch + 1 + row * a.positions + position;
}
__device__ inline float *latents_of(const Arguments &a) { return (float *)((Key *)a.scratch + 1 + a.rows * a.positions); }
__device__ inline float *states_of(const Arguments &a, int64_t position) {  // two of them take turns
  return latents_of(a) + (1 + position % 2) * a.rows * a.rank;
}

__device__ inline int64_t token_of(const Arguments &a, int64_t column) {
  return a.draft_to_target ? column + a.draft_to_target[column] : column;
}

// The token before a position. The one of the position before is the winner of a phase that has ended.
__device__ inline int64_t token_before(const Arguments &a, int64_t row, int64_t position) {
  const int64_t token = position ? token_of(a, column_of(load_now(key_at(a, row, position - 1)))) : a.anchors[row];
  return token < 0 ? 0 : token < a.target_vocabulary ? token : a.target_vocabulary - 1;  // never beyond W1
}

// All blocks wait here for all others; only in a cooperative launch, where all of them run. `goal` counts arrivals.
__device__ inline void grid_barrier(uint32_t *counter, uint32_t goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
    while (load_now(counter) < goal) spin();
    __threadfence();
  }
  __syncthreads();
}

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// 16 bytes of weights from `weights + index`; zeros from `size` on.
template <typename T>
__device__ uint4 load_vector(const T *weights, int64_t index, int64_t size, bool aligned) {
  constexpr int kCount = 16 / sizeof(T);
  union { uint4 vector; T values[kCount]; } loaded;
  loaded.vector = uint4{0, 0, 0, 0};
  if (aligned) {
    if (index < size) loaded.vector = __ldg((const uint4 *)(weights + index));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (index + i < size) loaded.values[i] = weights[index + i];
    }
  }
  return loaded.vector;
}

// ------------------------------------------------------------------------------------------------- the latent

// The latents of a tile of rows, in shared memory as [row][pitch] with zeros behind `rank` and behind the last row.
template <typename T>
__device__ int latent_pitch(int64_t rank) {  // in elements; the 64 bytes more keep eight rows in different banks
  return (int)((rank * (int)sizeof(T) + 127) / 128 * 128 + 64) / (int)sizeof(T);
}

template <typename T>
__device__ void load_latents(const Arguments &a, int64_t position, int64_t first_row, int tile_rows, T *latents, int64_t *before) {
  for (int i = threadIdx.x; i < tile_rows; i += blockDim.x) {
    before[i] = first_row + i < a.rows ? token_before(a, first_row + i, position) : 0;
  }
  __syncthreads();
  constexpr int kCount = 16 / sizeof(T);
  const int pitch = latent_pitch<T>(a.rank), vectors = pitch / kCount;
  for (int i = threadIdx.x; i < tile_rows * vectors; i += blockDim.x) {
    const int64_t row = first_row + i / vectors;
    const int place = i % vectors * kCount;
    union { uint4 vector; T values[kCount]; } loaded;
    loaded.vector = uint4{0, 0, 0, 0};
    if (row < a.rows) {
      if (a.kind == kVanilla) {
        loaded.vector = load_vector((const T *)a.w1 + before[i / vectors] * a.rank, place, a.rank, a.aligned);
      } else {
        for (int k = 0; k < kCount; ++k) {
          if (place + k < a.rank) loaded.values[k] = narrow<T>(load_now(latents_of(a) + row * a.rank + place + k));
        }
      }
    }
    *(uint4 *)(latents + (int64_t)(i / vectors) * pitch + place) = loaded.vector;
  }
  __syncthreads();
}

// One place of the latent, and of the state of an rnn, for all rows; by a warp.
template <typename T>
__device__ void mix(const Arguments &a, int64_t position, int64_t place) {
  const T *weight = (const T *)a.mixer_weight + place * a.mixer_row_stride;
  const int64_t next = a.rank * a.mixer_row_stride;  // from the gate to the candidate to the output of an rnn
  const int64_t width = a.kind == kRnn ? 3 * a.rank : a.rank;
  for (int64_t row = 0; row < a.rows; ++row) {
    const T *embedded = (const T *)a.w1 + token_before(a, row, position) * a.rank;
    const float *state = states_of(a, position + 1) + row * a.rank;  // of the position before
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (int64_t i = lane_id(); i < a.rank; i += kLanes) {
      const float previous = widen(embedded[i]);
      if (a.kind == kGated) {
        sums[0] += widen(weight[i]) * previous;
      } else {
        const float memory = position ? load_now(state + i) : 0.0f;
        for (int part = 0; part < 3; ++part) {
          sums[part] += widen(weight[part * next + i]) * memory + widen(weight[part * next + a.rank + i]) * previous;
        }
      }
    }
    const T *hidden = (const T *)a.mixer_hidden + (row * a.positions + position) * width + place;
    for (int part = 0; part < (a.kind == kRnn ? 3 : 1); ++part) {
      sums[part] = warp_sum(sums[part]) + widen(hidden[part * a.rank]);
    }
    if (lane_id() == 0) {
      float *latent = latents_of(a) + row * a.rank + place;
      const float gate = sigmoid(sums[0]);
      if (a.kind == kGated) {
        *latent = gate * widen(embedded[place]);
      } else {
        const float memory = position ? load_now(state + place) : 0.0f;
        states_of(a, position)[row * a.rank + place] = gate * memory + (1.0f - gate) * tanhf(sums[1]);
        *latent = tanhf(sums[2]);
      }
    }
  }
}

// The confidence logit of a row, which knows no token after the one before the position; by a warp.
template <typename T>
__device__ void score_confidence(const Arguments &a, int64_t position, int64_t row) {
  const T *weight = (const T *)a.confidence_weight;
  const T *hidden = (const T *)a.hidden + row * a.hidden_row_stride + position * a.hidden_size;
  float sum = 0.0f;
  for (int64_t i = lane_id(); i < a.hidden_size; i += kLanes) sum += widen(weight[i]) * widen(hidden[i]);
  if (a.confidence_reads_tokens) {
    const T *embedded = (const T *)a.w1 + token_before(a, row, position) * a.rank;
    for (int64_t i = lane_id(); i < a.rank; i += kLanes) sum += widen(weight[a.hidden_size + i]) * widen(embedded[i]);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) a.confidence[row * a.positions + position] = sum + widen(*(const T *)a.confidence_bias);
}

// ------------------------------------------------------------------------------------------------ the projection

// Candidates of a lane. It finishes columns `first + lane / 4` and 8 more, for the rows that its products are of.
template <typename T>
struct Chooser {
  const Arguments &a;
  int64_t position;
  float inverse;  // of the temperature; 0: the highest logit

  __device__ Key candidate(int64_t row, int64_t column, float product, uint32_t word) const {
    const int64_t at = (row * a.positions + position) * a.vocabulary + column;
    const T stored = narrow<T>(widen(((const T *)a.base)[at]) + product);
    if (a.logits) ((T *)a.logits)[at] = stored;
    float level = widen(stored);
    if (inverse > 0.0f) level = level * inverse + gumbel(word);
    return key_of(level, (uint32_t)column);
  }

  // `products[half]` of columns `column` and `column + 8`. The four words of a counter are for these two columns and
  // for two rows next to each other.
  __device__ Key both(int64_t row, int64_t column, const float *products, const Words &noise, Key best) const {
    if (row >= a.rows) return best;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (column + 8 * half < a.vocabulary) {
        const uint32_t word = row % 2 ? noise.word[2 * half + 1] : noise.word[2 * half];
        best = higher(best, candidate(row, column + 8 * half, products[half], word));
      }
    }
    return best;
  }

  __device__ Words noise(int64_t row, int64_t column) const {
    if (inverse == 0.0f || row >= a.rows) return Words{{0, 0, 0, 0}};
    return philox(a.seed, (uint32_t)(column / kColumns * 8 + column % 8), (uint32_t)position, (uint32_t)(row / 2), 1u);
  }
};

#if !defined(DSPARK_EMULATION)
// 16 columns of W2 times 8 rows, 16 places of each, added to `sums`. With g = lane / 4 and q = lane % 4: a register
// holds places 2q and 2q + 1; `w` is for (column g, place + 0), (g + 8, + 0), (g, + 8), (g + 8, + 8); `x` for row g,
// places + 0 and + 8; `sums` for (column g, row 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
__device__ inline void multiply(float *sums, const uint32_t *w, const uint32_t *x, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
}
__device__ inline void multiply(float *sums, const uint32_t *w, const uint32_t *x, fp16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
}
#endif

// The columns from `first` on, by tensor cores. Any places may meet in one instruction as long as both
// factors agree: each lane takes eight places that lie next to each other, 32 in a step of the warp.
template <typename T, int kTiles>
struct Projection {
  static constexpr int kRows = 8 * kTiles, kKeys = 2 * kTiles;
  static constexpr int kDeep = 4;  // steps whose loads are in flight

  __device__ static int64_t row_of_key(int key) { return 8 * (key / 2) + 2 * (lane_id() % 4) + key % 2; }

  __device__ static void columns(const Chooser<T> &chooser, const T *latents, int64_t first_row, int64_t first, Key *best) {
    const Arguments &a = chooser.a;
    const int g = lane_id() / 4, q = lane_id() % 4, pitch = latent_pitch<T>(a.rank);
    const int64_t last = a.vocabulary - 1, column = first + g;
    const T *upper = (const T *)a.w2 + (column < last ? column : last) * a.rank;
    const T *lower = (const T *)a.w2 + (column + 8 < last ? column + 8 : last) * a.rank;
    float sums[kTiles][4] = {};
    for (int64_t begin = 0; begin < a.rank; begin += 32 * kDeep) {
      uint4 w[kDeep][2];
#pragma unroll
      for (int step = 0; step < kDeep; ++step) {
        w[step][0] = load_vector(upper, begin + 32 * step + 8 * q, a.rank, a.aligned);
        w[step][1] = load_vector(lower, begin + 32 * step + 8 * q, a.rank, a.aligned);
      }
#pragma unroll
      for (int step = 0; step < kDeep; ++step) {
        if (begin + 32 * step >= a.rank) break;
        const uint32_t early[4] = {w[step][0].x, w[step][1].x, w[step][0].y, w[step][1].y};
        const uint32_t late[4] = {w[step][0].z, w[step][1].z, w[step][0].w, w[step][1].w};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 x = *(const uint4 *)(latents + (8 * tile + g) * pitch + begin + 32 * step + 8 * q);
          const uint32_t early_x[2] = {x.x, x.y}, late_x[2] = {x.z, x.w};
          multiply(sums[tile], early, early_x, T());
          multiply(sums[tile], late, late_x, T());
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t row = first_row + 8 * tile + 2 * q;
      const Words noise = chooser.noise(row, column);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float products[2] = {sums[tile][odd], sums[tile][2 + odd]};
        best[2 * tile + odd] = chooser.both(row + odd, column, products, noise, best[2 * tile + odd]);
      }
    }
  }
};

// The same in fp32, by ordinary instructions: lanes of one g share two columns, and q shares out their places.
template <int kTiles>
struct Projection<float, kTiles> {
  static constexpr int kRows = kFloatRows, kKeys = 1;
  static constexpr int kDeep = 4;

  __device__ static int64_t row_of_key(int) { return lane_id() % 4; }

  __device__ static void columns(const Chooser<float> &chooser, const float *latents, int64_t first_row, int64_t first, Key *best) {
    const Arguments &a = chooser.a;
    const int g = lane_id() / 4, q = lane_id() % 4, pitch = latent_pitch<float>(a.rank);
    const int64_t last = a.vocabulary - 1, column = first + g;
    const float *upper = (const float *)a.w2 + (column < last ? column : last) * a.rank;
    const float *lower = (const float *)a.w2 + (column + 8 < last ? column + 8 : last) * a.rank;
    float sums[kFloatRows][2] = {};
    for (int64_t begin = 0; begin < a.rank; begin += 16 * kDeep) {
      uint4 w[kDeep][2];
#pragma unroll
      for (int step = 0; step < kDeep; ++step) {
        w[step][0] = load_vector(upper, begin + 16 * step + 4 * q, a.rank, a.aligned);
        w[step][1] = load_vector(lower, begin + 16 * step + 4 * q, a.rank, a.aligned);
      }
#pragma unroll
      for (int step = 0; step < kDeep; ++step) {
        if (begin + 16 * step >= a.rank) break;
#pragma unroll
        for (int row = 0; row < kFloatRows; ++row) {
          const uint4 x = *(const uint4 *)(latents + row * pitch + begin + 16 * step + 4 * q);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 &v = w[step][half];
            float &sum = sums[row][half];
            sum = fmaf(from_bits(v.x), from_bits(x.x), sum);
            sum = fmaf(from_bits(v.y), from_bits(x.y), sum);
            sum = fmaf(from_bits(v.z), from_bits(x.z), sum);
            sum = fmaf(from_bits(v.w), from_bits(x.w), sum);
          }
        }
      }
    }
    float products[2];
    reduce(sums, products);
    const int64_t row = first_row + q;
    best[0] = chooser.both(row, column, products, chooser.noise(row, column), best[0]);
  }

  // Sums over the four lanes of a g: lane q ends with those of row q. Half of what is left is given away at a time.
  __device__ static void reduce(float (*sums)[2], float *products) {
    const bool high = lane_id() & 2, odd = lane_id() & 1;
    float two[2][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float kept = high ? sums[row + 2][half] : sums[row][half];
        const float given = high ? sums[row][half] : sums[row + 2][half];
        two[row][half] = kept + __shfl_xor_sync(kAllLanes, given, 2);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float kept = odd ? two[1][half] : two[0][half], given = odd ? two[0][half] : two[1][half];
      products[half] = kept + __shfl_xor_sync(kAllLanes, given, 1);
    }
  }
};

// The best candidate of the block for each row of the tile goes to the grid's.
template <typename P>
__device__ void publish_best(const Arguments &a, int64_t position, int64_t first_row, const Key *best, Key *of_warps) {
#pragma unroll
  for (int key = 0; key < P::kKeys; ++key) {
    Key mine = best[key];
    for (int offset = 16; offset >= 4; offset /= 2) mine = higher(mine, __shfl_xor_sync(kAllLanes, mine, offset));
    if (lane_id() < 4) of_warps[warp_id() * P::kRows + P::row_of_key(key)] = mine;
  }
  __syncthreads();
  for (int row = threadIdx.x; row < P::kRows && first_row + row < a.rows; row += blockDim.x) {
    Key mine = 0;
    for (int warp = 0; warp < warps_of_block(); ++warp) mine = higher(mine, of_warps[warp * P::kRows + row]);
    if (mine) atomicMax(key_at(a, first_row + row, position), mine);
  }
  __syncthreads();
}

// Logits and winners of a position.
template <typename T, int kTiles>
__device__ void project(const Arguments &a, int64_t position, unsigned char *shared) {
  typedef Projection<T, kTiles> P;
  Key *of_warps = (Key *)shared;
  int64_t *before = (int64_t *)(of_warps + warps_of_block() * P::kRows);
  T *latents = (T *)(before + P::kRows);
  const Chooser<T> chooser = {a, position, a.temperature > 0 ? (float)(1.0 / a.temperature) : 0.0f};
  const int64_t units = (a.vocabulary + kColumns - 1) / kColumns;
  const int64_t mine = (int64_t)blockIdx.x * warps_of_block() + warp_id(), step = (int64_t)gridDim.x * warps_of_block();
  if (a.confidence_weight && warp_id() == warps_of_block() - 1) {
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) score_confidence<T>(a, position, row);
  }
  int64_t tile = 0;
  for (int64_t first_row = 0; first_row < a.rows; first_row += P::kRows, ++tile) {
    load_latents<T>(a, position, first_row, P::kRows, latents, before);
    Key best[P::kKeys] = {};
    for (int64_t unit = mine; unit < units; unit += step) {
      const int64_t place = (position + tile) % 2 ? units - 1 - unit : unit;
      P::columns(chooser, latents, first_row, place * kColumns, best);
    }
    publish_best<P>(a, position, first_row, best, of_warps);
  }
}

__device__ inline int phases_of_position(const Arguments &a) { return a.kind == kVanilla ? 1 : 2; }

// One phase of the block: the last one writes down the tokens.
template <typename T, int kTiles>
__device__ void phase(const Arguments &a, int64_t number, unsigned char *shared) {
  const int64_t position = number / phases_of_position(a);
  if (position == a.positions) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.rows * a.positions; i += (int64_t)gridDim.x * blockDim.x) {
      const int64_t column = column_of(load_now((Key *)a.scratch + 1 + i));
      a.columns[i] = column;
      a.tokens[i] = token_of(a, column);
    }
  } else if (a.kind != kVanilla && number % 2 == 0) {
    const int64_t warps = (int64_t)gridDim.x * warps_of_block();
    for (int64_t place = (int64_t)blockIdx.x * warps_of_block() + warp_id(); place < a.rank; place += warps) {
      mix<T>(a, position, place);
    }
  } else {
    project<T, kTiles>(a, position, shared);
  }
}

// Phases from `first` to before `last`: all of them in a cooperative launch, or one.
template <typename T, int kTiles>
__device__ void phases(const Arguments &a, int32_t first, int32_t last) {
  DSPARK_SHARED(shared);
  for (int32_t number = first; number < last; ++number) {
    if (number > first) grid_barrier(counter_of(a), gridDim.x * (uint32_t)(number - first));
    phase<T, kTiles>(a, number, shared);
  }
}

}  // namespace dspark

#define DSPARK_HEAD(dtype, tiles)                                                                     \
  extern "C" __global__ void __launch_bounds__(256, tiles > 2 ? 1 : 2)                                \
      dspark_head_##dtype##_##tiles(const DsparkHeadArguments arguments, int32_t first, int32_t last) { \
    dspark::phases<dspark::dtype, tiles>(arguments, first, last);                                     \
  }
#define DSPARK_HEAD_OF(dtype, tiles) DSPARK_HEAD(dtype, tiles)
namespace dspark {
typedef float fp32;
}

#ifdef DSPARK_ONLY_DTYPE  // one kernel is compiled where it is needed, as by NVRTC
DSPARK_HEAD_OF(DSPARK_ONLY_DTYPE, DSPARK_ONLY_TILES)
#else
DSPARK_HEAD(fp32, 1)
DSPARK_HEAD(bf16, 1)
DSPARK_HEAD(bf16, 2)
DSPARK_HEAD(bf16, 8)
DSPARK_HEAD(fp16, 1)
DSPARK_HEAD(fp16, 2)
DSPARK_HEAD(fp16, 8)
#endif

// ---------------------------------------------------------------------------------- the host's side, built by nvcc

#if !defined(DSPARK_EMULATION) && !defined(__CUDACC_RTC__)
namespace {

const void *kernel_of(int32_t dtype, int32_t tiles) {
  if (dtype == 0) return (const void *)dspark_head_fp32_1;
  if (dtype == 1) return (const void *)(tiles == 1 ? dspark_head_bf16_1 : tiles == 2 ? dspark_head_bf16_2 : dspark_head_bf16_8);
  return (const void *)(tiles == 1 ? dspark_head_fp16_1 : tiles == 2 ? dspark_head_fp16_2 : dspark_head_fp16_8);
}

}  // namespace

// All of them return CUDA's error, 0 if none, and act on the current device.
extern "C" int dspark_head_occupancy(int32_t dtype, int32_t tiles, int32_t threads, int32_t shared_bytes, int32_t *blocks) {
  const void *kernel = kernel_of(dtype, tiles);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}

// Several phases are a cooperative launch: `blocks` must all fit on the device.
extern "C" int dspark_head_launch(int32_t dtype, int32_t tiles, const DsparkHeadArguments *arguments, int32_t first,
                                  int32_t last, int32_t blocks, int32_t threads, int32_t shared_bytes, void *stream) {
  void *parameters[] = {(void *)arguments, &first, &last};
  const void *kernel = kernel_of(dtype, tiles);
  const dim3 grid(blocks), block(threads);
  const cudaStream_t queue = (cudaStream_t)stream;
  if (last - first > 1) return cudaLaunchCooperativeKernel(kernel, grid, block, parameters, shared_bytes, queue);
  return cudaLaunchKernel(kernel, grid, block, parameters, shared_bytes, queue);
}

extern "C" const char *dspark_head_error(int error) { return cudaGetErrorString((cudaError_t)error); }
#endif
