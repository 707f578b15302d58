// The sequential head of a DSpark drafter on a CPU: a whole block in one call.
//
// For every position, for all rows: embed the token before it, make the latent (vanilla, gated or rnn) and the confidence
// logit, then `logits = base + W2 @ latent`, and the position's token from them. W2 (vocabulary * rank weights) is read once
// per position, for all rows; all else is small. The floor is therefore `positions * bytes of W2 / memory bandwidth`.
//
// Only the standard library and the compiler's intrinsics are included, so it builds in seconds, for any version of torch.
// The body below `DSPARK_ISA` is compiled once per instruction set, and chosen at run time. Sums are in fp32, logits are
// rounded once, and tokens are chosen or drawn from the rounded logits. Results do not depend on the number of threads.

#ifndef DSPARK_ISA  // ---------------------------------------------------------------- common to all instruction sets

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
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
  void *scratch;                                    // of the GPU; not used here
  double temperature;                               // 0: the highest logit
  uint64_t seed;
  int32_t kind;                     // 0 vanilla, 1 gated, 2 rnn
  int32_t confidence_reads_tokens;  // whether `confidence_weight` has a part for W1[previous]
  int32_t dtype;                    // 0 fp32, 1 bf16, 2 fp16
  int32_t isa;                      // -1: the best there is
  int32_t threads;
  int32_t aligned;  // of the GPU; not used here
};

namespace {

using Arguments = DsparkHeadArguments;
constexpr int64_t kLanes = 16;    // columns of a tile, and floats of a vector
constexpr int64_t kBlock = 1024;  // columns whose weights are summed together when a token is drawn
enum Kind { kVanilla, kGated, kRnn };

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return from_bits(uint32_t(value.bits) << 16); }
inline float widen(fp16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest << 13));  // infinite or not a number
  return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));      // subnormal numbers come out right, too
}

template <typename T>
T narrow(float value);
template <>
inline float narrow<float>(float value) {
  return value;
}
template <>
inline bf16 narrow<bf16>(float value) {
  const uint32_t bits = to_bits(value);
  if (value != value) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to nearest, ties to even
}
template <>
inline fp16 narrow<fp16>(float value) {
  const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and more
  if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded digits at the end of the fraction
    return {uint16_t(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000))};
  }
  return {uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13))};
}

inline int64_t lower_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t size, int64_t of) { return (size + of - 1) / of; }

// What the threads share, apart from the arguments. The latent is padded with zeros to whole pairs of vectors.
struct Workspace {
  explicit Workspace(const Arguments &a)
      : tiles(ceil_div(a.vocabulary, kLanes)),
        blocks(ceil_div(a.vocabulary, kBlock)),
        mixer_size(a.kind == kVanilla ? 0 : a.kind == kGated ? a.rank : 3 * a.rank),
        padded_rank(ceil_div(a.rank, 2 * kLanes) * 2 * kLanes),
        threads(a.threads < 1 ? 1 : lower_of(a.threads, tiles)),
        previous(a.rows * a.rank),
        state(a.rows * a.rank),
        mixed(a.rows * mixer_size),
        latent(a.rows * padded_rank),
        highest(a.rows),
        best_value(threads * a.rows * kLanes),
        rounded(a.rows * padded_rank),
        ending(kLanes * a.rank),
        best_column(threads * a.rows * kLanes),
        sums(a.rows * blocks) {}

  const int64_t tiles, blocks, mixer_size, padded_rank, threads;
  std::vector<float> previous, state, mixed, latent, highest, best_value;
  std::vector<uint32_t> rounded;  // the latent in the dtype of the weights
  std::vector<uint32_t> ending;   // the last rows of W2, if they do not fill a tile, with zeros behind them
  std::vector<int32_t> best_column;
  std::vector<double> sums;
  int32_t failed = 0;  // whether a draft token was outside of the target's vocabulary
};

// Philox 4x32-10 (Salmon et al. 2011): a number in [0, 1) that depends on seed, row and position alone.
inline double uniform(uint64_t seed, uint32_t row, uint32_t position) {
  uint32_t counter[4] = {row, position, 0, 0}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(0xD2511F53u) * counter[0], second = uint64_t(0xCD9E8D57u) * counter[2];
    const uint32_t next[4] = {uint32_t(second >> 32) ^ counter[1] ^ key[0], uint32_t(second),
                              uint32_t(first >> 32) ^ counter[3] ^ key[1], uint32_t(first)};
    std::memcpy(counter, next, sizeof next);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return double((uint64_t(counter[0]) << 21) ^ (counter[1] >> 11)) * 0x1p-53;
}

}  // namespace

// The body is compiled for each instruction set, so it uses no templates of the standard library: one that is not inlined
// could come out in the instructions of another set.
#define DSPARK_ISA generic
#include __FILE__
#undef DSPARK_ISA

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DSPARK_F16C
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define DSPARK_ISA avx2
#include __FILE__
#undef DSPARK_ISA
#pragma GCC pop_options

#define DSPARK_AVX512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define DSPARK_ISA avx512
#include __FILE__
#undef DSPARK_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#define DSPARK_ISA avx512bf16
#define DSPARK_DOT_BF16
#include __FILE__
#undef DSPARK_DOT_BF16
#undef DSPARK_ISA
#pragma GCC pop_options
#undef DSPARK_AVX512
#undef DSPARK_F16C
#define DSPARK_HAS_X86_SETS
#endif

// The best instruction set of this machine: 0 generic, 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16 products.
extern "C" int dspark_head_best_isa() {
#ifdef DSPARK_HAS_X86_SETS
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!wide) return 1;
  return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
  return 0;
#endif
}

// Returns 0, or an error: 1 this machine lacks the instruction set, 2 an anchor or 3 a draft token is outside of the target's
// vocabulary, 4 the dtype is unknown.
extern "C" int dspark_head_cpu(const DsparkHeadArguments *arguments) {
  const Arguments &a = *arguments;
  const int best = dspark_head_best_isa(), isa = a.isa < 0 ? best : a.isa;
  if (isa > best) return 1;
  if (a.dtype < 0 || a.dtype > 2) return 4;
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.anchors[row] < 0 || a.anchors[row] >= a.target_vocabulary) return 2;
  }
  Workspace workspace(a);
#define DSPARK_RUN(set)                                        \
  do {                                                         \
    if (a.dtype == 0) set::Head<float>(a, workspace).run();    \
    if (a.dtype == 1) set::Head<bf16>(a, workspace).run();     \
    if (a.dtype == 2) set::Head<fp16>(a, workspace).run();     \
    return workspace.failed ? 3 : 0;                           \
  } while (false)
#ifdef DSPARK_HAS_X86_SETS
  if (isa == 3) DSPARK_RUN(avx512bf16);
  if (isa == 2) DSPARK_RUN(avx512);
  if (isa == 1) DSPARK_RUN(avx2);
#endif
  DSPARK_RUN(generic);
}

#else  // ------------------------------------------------------------------------- once for each instruction set

namespace {
namespace DSPARK_ISA {

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

inline floats splat(float value) { return value - floats{}; }
inline floats bits_to_floats(words bits) { return (floats)bits; }

inline floats load(const float *source) {
  floats vector;
  std::memcpy(&vector, source, sizeof vector);
  return vector;
}
inline floats load(const bf16 *source) {
  halves bits;
  std::memcpy(&bits, source, sizeof bits);
  return bits_to_floats(__builtin_convertvector(bits, words) << 16);
}
inline floats load(const fp16 *source) {
#ifdef DSPARK_AVX512
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(source)));
#elif defined(DSPARK_F16C)
  const __m128i *halves_of = reinterpret_cast<const __m128i *>(source);
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(halves_of)), high = _mm256_cvtph_ps(_mm_loadu_si128(halves_of + 1));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  floats vector;
  for (int lane = 0; lane < kLanes; ++lane) vector[lane] = widen(source[lane]);
  return vector;
#endif
}

// Write as rounded to the dtype of the logits; returns what was written.
inline floats store(float *target, floats value) {
  std::memcpy(target, &value, sizeof value);
  return value;
}
inline floats store(bf16 *target, floats value) {
  const words bits = (words)value;
  const words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const ints is_number = value == value;
  const words kept = (rounded & (words)is_number) | (0x7fc0 & ~(words)is_number);
  const halves narrowed = __builtin_convertvector(kept, halves);
  std::memcpy(target, &narrowed, sizeof narrowed);
  return bits_to_floats(kept << 16);
}
inline floats store(fp16 *target, floats value) {
#ifdef DSPARK_F16C
  for (int half = 0; half < 2; ++half) {
    __m256 wide;
    std::memcpy(&wide, (const float *)&value + 8 * half, sizeof wide);
    const __m128i narrowed = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(target + 8 * half, &narrowed, sizeof narrowed);
  }
#else
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = narrow<fp16>(value[lane]);
#endif
  return load(target);
}

// Lane `i` of the result is the sum of all lanes of `sums[i]`.
inline floats transpose_sums(const floats *sums) {
  floats eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const floats a = sums[i], b = sums[i + 8];
    eight[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }  // lanes: i, 8 of them; then i + 8
  for (int i = 0; i < 4; ++i) {
    const floats a = eight[i], b = eight[i + 4];
    four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }  // four each: i, i + 4, i + 8, i + 12
  for (int i = 0; i < 2; ++i) {
    const floats a = four[i], b = four[i + 2];
    two[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }  // in each four: i, i + 2, i, i + 2
  const floats a = two[0], b = two[1];
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}

template <typename A, typename B>
inline float dot(const A *weights, const B *values, int64_t size) {
  floats sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += load(weights + i) * load(values + i);
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  for (; i < size; ++i) total += widen(weights[i]) * widen(values[i]);
  return total;
}

// exp of values up to 0, to about 2 units in the last place; 0 below -87.
inline floats exp_of_negative(floats x) {
  const floats clamped = x > splat(-87.0f) ? x : splat(-87.0f);
  const floats scaled = clamped * 1.44269504f;
  const ints whole = __builtin_convertvector(scaled - 0.5f, ints);  // towards zero, so to nearest for negative numbers
  const floats n = __builtin_convertvector(whole, floats);
  const floats f = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  floats series = splat(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    series = series * f + factor;
  }
  const floats power = bits_to_floats((words)(whole + 127) << 23);
  return x > splat(-87.0f) ? series * power : splat(0.0f);
}

// Vectors of weights and of a latent, and how their products are added to a sum.
template <typename T>
struct Products {
  typedef floats Vector;
  static constexpr int64_t kSize = kLanes;
  static Vector load_weights(const T *weights) { return load(weights); }
  static Vector load_latent(const float *latent, const T *) { return load(latent); }
  static void add(floats &sum, Vector a, Vector b) { sum += a * b; }
};

#ifdef DSPARK_DOT_BF16
// One instruction for pairs of bf16.
template <>
struct Products<bf16> {
  typedef __m512bh Vector;
  static constexpr int64_t kSize = 2 * kLanes;
  static Vector load_weights(const bf16 *weights) { return (Vector)_mm512_loadu_si512(weights); }
  static Vector load_latent(const float *, const bf16 *rounded) { return (Vector)_mm512_loadu_si512(rounded); }
  static void add(floats &sum, Vector a, Vector b) { sum = (floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

template <typename T>
class Head {
 public:
  Head(const Arguments &arguments, Workspace &workspace)
      : a(arguments),
        base(static_cast<const T *>(a.base)),
        w1(static_cast<const T *>(a.w1)),
        w2(static_cast<const T *>(a.w2)),
        tiles(workspace.tiles),
        blocks(workspace.blocks),
        mixer_size(workspace.mixer_size),
        padded_rank(workspace.padded_rank),
        threads(workspace.threads),
        previous(workspace.previous.data()),
        state(workspace.state.data()),
        mixed(workspace.mixed.data()),
        latent(workspace.latent.data()),
        highest(workspace.highest.data()),
        best_value(workspace.best_value.data()),
        rounded(reinterpret_cast<T *>(workspace.rounded.data())),
        ending(reinterpret_cast<T *>(workspace.ending.data())),
        best_column(workspace.best_column.data()),
        sums(workspace.sums.data()),
        failed(workspace.failed) {
    const int64_t begin = a.vocabulary / kLanes * kLanes;
    for (int64_t i = 0; i < (a.vocabulary - begin) * a.rank; ++i) ending[i] = w2[begin * a.rank + i];
  }

  void run() {
#ifdef _OPENMP
#pragma omp parallel num_threads(int(threads))
    work(omp_get_thread_num(), omp_get_num_threads());
#else
    work(0, 1);
#endif
  }

 private:
  const T *base_of(int64_t row, int64_t position) const { return base + (row * a.positions + position) * a.vocabulary; }
  T *logits_of(int64_t row, int64_t position) const {
    return static_cast<T *>(a.logits) + (row * a.positions + position) * a.vocabulary;
  }
  const T *hidden_of(int64_t row, int64_t position) const {
    return static_cast<const T *>(a.hidden) + row * a.hidden_row_stride + position * a.hidden_size;
  }

  static void wait() {
#ifdef _OPENMP
#pragma omp barrier
#endif
  }

  // One thread's part of the whole block.
  void work(int64_t thread, int64_t count) {
    for (int64_t position = 0; position < a.positions; ++position) {
      for (int64_t row = thread; row < a.rows; row += count) embed(row, position);
      wait();
      if (a.kind != kVanilla) {
        for (int64_t unit = thread; unit < mixer_size; unit += count) mix(unit, position);
        wait();
      }
      for (int64_t row = thread; row < a.rows; row += count) finish_latent(row);
      wait();
      const int64_t first = tiles * thread / count, last = tiles * (thread + 1) / count;
      project(thread, position, first, last);
      wait();
      if (a.temperature > 0) {
        for (int64_t row = thread; row < a.rows; row += count) best_of(row, count);
        wait();
        for (int64_t block = thread; block < blocks; block += count) weigh(block, position);
        wait();
      }
      for (int64_t row = thread; row < a.rows; row += count) {
        choose(row, position, a.temperature > 0 ? draw(row, position) : best_of(row, count));
      }
    }
  }

  // W1 of the token before the position, and the confidence logit, which knows no later token.
  void embed(int64_t row, int64_t position) {
    int64_t token = position ? a.tokens[row * a.positions + position - 1] : a.anchors[row];
    if (token < 0 || token >= a.target_vocabulary) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      token = 0;
    }
    for (int64_t i = 0; i < a.rank; ++i) previous[row * a.rank + i] = widen(w1[token * a.rank + i]);
    if (!a.confidence_weight) return;
    const T *weight = static_cast<const T *>(a.confidence_weight);
    float sum = widen(*static_cast<const T *>(a.confidence_bias)) + dot(weight, hidden_of(row, position), a.hidden_size);
    if (a.confidence_reads_tokens) sum += dot(weight + a.hidden_size, &previous[row * a.rank], a.rank);
    a.confidence[row * a.positions + position] = sum;
  }

  // One output of the gate's or the recurrent cell's linear layer, for all rows.
  void mix(int64_t unit, int64_t position) {
    const T *weight = static_cast<const T *>(a.mixer_weight) + unit * a.mixer_row_stride;
    const T *of_previous = a.kind == kRnn ? weight + a.rank : weight;
    for (int64_t row = 0; row < a.rows; ++row) {
      const T *of_hidden = static_cast<const T *>(a.mixer_hidden) + (row * a.positions + position) * mixer_size;
      float sum = widen(of_hidden[unit]) + dot(of_previous, &previous[row * a.rank], a.rank);
      if (a.kind == kRnn && position) sum += dot(weight, &state[row * a.rank], a.rank);
      mixed[row * mixer_size + unit] = sum;
    }
  }

  // The latent of a row, as rounded to the dtype of the weights.
  void finish_latent(int64_t row) {
    const float *before = &previous[row * a.rank], *mixture = mixed + row * mixer_size;
    for (int64_t i = 0; i < a.rank; ++i) {
      float value = before[i];
      if (a.kind == kGated) value *= sigmoid(mixture[i]);
      if (a.kind == kRnn) {
        const float gate = sigmoid(mixture[i]);
        float &memory = state[row * a.rank + i];
        memory = gate * memory + (1 - gate) * std::tanh(mixture[a.rank + i]);
        value = std::tanh(mixture[2 * a.rank + i]);
      }
      rounded[row * padded_rank + i] = narrow<T>(value);
      latent[row * padded_rank + i] = widen(rounded[row * padded_rank + i]);
    }
  }

  static float sigmoid(float value) { return 1 / (1 + std::exp(-value)); }

  // Logits of the tiles from `first` to `last`, and the best column in each lane so far.
  void project(int64_t thread, int64_t position, int64_t first, int64_t last) {
    for (int64_t i = thread * a.rows * kLanes; i < (thread + 1) * a.rows * kLanes; ++i) {
      best_value[i] = -__builtin_inff();
      best_column[i] = INT32_MAX;
    }
    for (int64_t tile = first; tile < last; ++tile) {
      int64_t row = 0;
      for (; row + 4 <= a.rows; row += 4) project_tile<4>(thread, position, tile, row);
      for (; row + 2 <= a.rows; row += 2) project_tile<2>(thread, position, tile, row);
      for (; row < a.rows; ++row) project_tile<1>(thread, position, tile, row);
    }
  }

  // Sixteen columns of W2 times `kRows` latents, sixteen sums at a time.
  template <int kRows>
  void project_tile(int64_t thread, int64_t position, int64_t tile, int64_t row) {
    constexpr int kColumns = kLanes / kRows;
    const int64_t first = tile * kLanes, count = lower_of(kLanes, a.vocabulary - first);
    const T *weights = count < kLanes ? ending : w2 + first * a.rank;
    alignas(64) float products[kRows][kLanes];
    for (int pass = 0; pass < kRows; ++pass) {
      floats sums[kLanes];
      multiply<kRows>(weights + pass * kColumns * a.rank, row, sums);
      const floats reduced = transpose_sums(sums);
      for (int r = 0; r < kRows; ++r) std::memcpy(&products[r][pass * kColumns], (float *)&reduced + r * kColumns, kColumns * 4);
    }
    for (int r = 0; r < kRows; ++r) finish_tile(thread, row + r, position, first, count, products[r]);
  }

  // `sums[r * kColumns + c]` is, spread over its lanes, the product of row `c` of `weights` and the latent of `row + r`.
  // Few columns at a time keep the reading close to sequential, which is what memory is fastest at.
  template <int kRows>
  void multiply(const T *weights, int64_t row, floats *sums) const {
    constexpr int kColumns = kLanes / kRows, kGroup = kRows;
    for (int group = 0; group < kColumns; group += kGroup) {
      multiply_group<kRows, kGroup>(weights + group * a.rank, row, sums + group);
    }
  }

  // The same of `kGroup` columns, with at least four sums in the making, since each has to wait for its last product.
  template <int kRows, int kGroup>
  void multiply_group(const T *weights, int64_t row, floats *sums) const {
    typedef Products<T> P;
    constexpr int kColumns = kLanes / kRows, kParts = kRows * kGroup < 4 ? 4 / (kRows * kGroup) : 1;
    const char *ahead = reinterpret_cast<const char *>(weights) + kAhead;
    floats parts[kParts][kRows][kGroup] = {};
    int64_t i = 0;
    for (; i + kParts * P::kSize <= a.rank; i += kParts * P::kSize) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        ahead = multiply_vectors<kRows, kGroup>(weights, row, i + part * P::kSize, ahead, parts[part]);
      }
    }
    for (; i + P::kSize <= a.rank; i += P::kSize) {
      ahead = multiply_vectors<kRows, kGroup>(weights, row, i, ahead, parts[0]);
    }
    // Unrolled, so that no place in `parts` is computed and all of it can be in registers.
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kGroup; ++c) {
        floats &sum = sums[r * kColumns + c];
        sum = parts[0][r][c];
#pragma GCC unroll 4
        for (int part = 1; part < kParts; ++part) sum += parts[part][r][c];
        for (int64_t k = i; k < a.rank; ++k) sum[0] += widen(weights[c * a.rank + k]) * latent[(row + r) * padded_rank + k];
      }
    }
  }

  // Places `i` and those that are in a vector with it. Inlined, or the sums would go through memory.
  template <int kRows, int kGroup>
  __attribute__((always_inline)) const char *multiply_vectors(const T *weights, int64_t row, int64_t i, const char *ahead, floats (*sums)[kGroup]) const {
    typedef Products<T> P;
    typename P::Vector values[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int64_t place = (row + r) * padded_rank + i;
      values[r] = P::load_latent(latent + place, rounded + place);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kGroup; ++c) {
      ahead = prefetch(ahead, P::kSize * sizeof(T));
      const typename P::Vector w = P::load_weights(weights + c * a.rank + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) P::add(sums[r][c], w, values[r]);
    }
    return ahead;
  }

  // Into the second cache: the first is too small for all that is in flight. Returns the place to continue from.
  static const char *prefetch(const char *place, int64_t bytes) {
    __builtin_prefetch(place, 0, 2);
    return place + bytes;
  }

  void finish_tile(int64_t thread, int64_t row, int64_t position, int64_t first, int64_t count, const float *products) {
    alignas(64) T rounded[kLanes];
    const T *source = base_of(row, position) + first;
    T *target = a.logits ? logits_of(row, position) + first : rounded;
    floats value;
    if (count == kLanes) {
      value = store(target, load(source) + load(products));
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        value[lane] = -__builtin_inff();
        if (lane >= count) continue;
        target[lane] = narrow<T>(widen(source[lane]) + products[lane]);
        value[lane] = widen(target[lane]);
      }
    }
    float *values = &best_value[(thread * a.rows + row) * kLanes];
    int32_t *columns = &best_column[(thread * a.rows + row) * kLanes];
    floats best = load(values);
    ints column;
    std::memcpy(&column, columns, sizeof column);
    const ints higher = value > best;
    best = higher ? value : best;
    column = higher ? ints{} + int32_t(first) : column;  // of lane 0: lanes are added in the end
    store(values, best);
    std::memcpy(columns, &column, sizeof column);
  }

  // The lowest column with the highest logit of a row; also notes the logit.
  int64_t best_of(int64_t row, int64_t count) {
    float best = -__builtin_inff();
    int64_t column = 0;
    for (int64_t thread = 0; thread < count; ++thread) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t place = (thread * a.rows + row) * kLanes + lane;
        const int64_t candidate = best_column[place] + lane;
        const float value = best_value[place];
        if (value > best || (value == best && candidate < column)) {
          best = value;
          column = candidate;
        }
      }
    }
    highest[row] = best;
    return column;
  }

  // Weights `exp((x - highest) / temperature)` of the logits from `column` on; none after `stop`.
  floats weights_at(int64_t row, int64_t position, int64_t column, int64_t stop) const {
    const T *logits = logits_of(row, position) + column;
    alignas(64) T padded[kLanes];
    if (stop - column < kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) padded[lane] = column + lane < stop ? logits[lane] : narrow<T>(-__builtin_inff());
      logits = padded;
    }
    return exp_of_negative((load(logits) - highest[row]) * float(1 / a.temperature));
  }

  // The sum of the weights of one block of columns, for all rows.
  void weigh(int64_t block, int64_t position) {
    const int64_t stop = lower_of(a.vocabulary, (block + 1) * kBlock);
    for (int64_t row = 0; row < a.rows; ++row) {
      floats sum{};
      for (int64_t column = block * kBlock; column < stop; column += kLanes) sum += weights_at(row, position, column, stop);
      double total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
      sums[row * blocks + block] = total;
    }
  }

  // A column by inversion: first its block, then its place in the block; never one of weight zero.
  int64_t draw(int64_t row, int64_t position) const {
    const double *weights = &sums[row * blocks];
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += weights[block];
    double level = uniform(a.seed, uint32_t(row), uint32_t(position)) * total;
    int64_t block = 0, last = 0;
    for (; block < blocks; ++block) {
      if (weights[block] > 0) last = block;
      if (level < weights[block]) break;
      level -= weights[block];
    }
    if (block == blocks) {  // rounding: the end of the last block that weighs anything
      block = last;
      level = __builtin_inf();
    }
    return column_at(row, position, block, level);
  }

  int64_t column_at(int64_t row, int64_t position, int64_t block, double level) const {
    const int64_t stop = lower_of(a.vocabulary, (block + 1) * kBlock);
    int64_t chosen = block * kBlock;
    for (int64_t column = block * kBlock; column < stop; column += kLanes) {
      const floats weights = weights_at(row, position, column, stop);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!(weights[lane] > 0)) continue;
        chosen = column + lane;
        if (level < weights[lane]) return chosen;
        level -= weights[lane];
      }
    }
    return chosen;
  }

  void choose(int64_t row, int64_t position, int64_t column) {
    a.columns[row * a.positions + position] = column;
    a.tokens[row * a.positions + position] = a.draft_to_target ? column + a.draft_to_target[column] : column;
  }

  static constexpr int64_t kAhead = 16384;  // bytes of W2 to ask memory for in advance
  const Arguments &a;
  const T *base, *w1, *w2;
  const int64_t tiles, blocks, mixer_size, padded_rank, threads;
  float *previous, *state, *mixed, *latent, *highest, *best_value;
  T *rounded, *ending;
  int32_t *best_column;
  double *sums;
  int32_t &failed;
};

}  // namespace DSPARK_ISA
}  // namespace

#endif
