// CUDA on a CPU, as much of it as head_cuda.cu uses.
//
// Built with -fsanitize=thread it tells the sanitizer which memory accesses are in order: those before and after
// __syncthreads, and those before a fence and an atomic and after a read of it and a fence. Shuffles and tensor-core
// instructions put nothing in order. What is not seen: memory weaker than the CPU's, and the cost of anything.

#pragma once

#include "fibers.h"

#define __global__
#define __device__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulation {

EMULATION_UNSEEN static uint64_t shuffle_xor(uint64_t value, int mask) {
  Warp &warp = *current->warp;
  const unsigned turn = warp.generation % 2;
  const int lane = current->lane;
  warp.values[turn][lane] = value;
  if (is_last(warp, kShuffle, mask)) {
    release(warp);
  } else {
    wait(warp);
  }
  return warp.values[turn][lane ^ mask];
}

// Two numbers of 16 bits are in a register, the one of the lower place in its lower half.
template <typename T>
EMULATION_UNSEEN float half_of(uint32_t pair, int place) {
  return widen(T{(uint16_t)(pair >> 16 * (place % 2))});
}

// By the last lane for all of them; see `multiply` in head_cuda.cu for which lane holds what.
template <typename T>
EMULATION_UNSEEN void multiply_warp(Warp &warp) {
  float w[16][16], x[8][16];  // column or row, and place
  for (int place = 0; place < 16; ++place) {
    const int lane = place % 8 / 2, late = place / 8;
    for (int column = 0; column < 16; ++column) {
      w[column][place] = half_of<T>(warp.w[4 * (column % 8) + lane][2 * late + column / 8], place);
    }
    for (int row = 0; row < 8; ++row) x[row][place] = half_of<T>(warp.x[4 * row + lane][late], place);
  }
  for (int column = 0; column < 16; ++column) {
    for (int row = 0; row < 8; ++row) {
      float &sum = warp.sums[4 * (column % 8) + row / 2][2 * (column / 8) + row % 2];
      for (int place = 0; place < 16; ++place) sum += w[column][place] * x[row][place];
    }
  }
}

// A fence before an atomic hands on what was done before it, through the place that the atomic changes; whoever reads that
// and has a fence behind it takes it up. Atomics alone hand on nothing.
EMULATION_UNSEEN static void about_to_change(const void *place) {
  ++progress;
  if (current->fenced) EMULATION_TSAN(__tsan_release((void *)place));
  current->fenced = false;
  (void)place;
}
EMULATION_UNSEEN static void has_read(const void *place) { current->read = place; }
EMULATION_UNSEEN static void fence() {
  current->fenced = true;
  if (current->read) EMULATION_TSAN(__tsan_acquire((void *)current->read));
  current->read = nullptr;
}
EMULATION_UNSEEN static Index index_of_thread() { return thread_index; }
EMULATION_UNSEEN static Index index_of_block() { return block_index; }
EMULATION_UNSEEN static unsigned char *shared_memory() { return current->block->shared; }

}  // namespace emulation

// ------------------------------------------------------------------------------------------- what kernels see of it

#define threadIdx (emulation::index_of_thread())
#define blockIdx (emulation::index_of_block())
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)
#define DSPARK_SHARED(name) unsigned char *name = emulation::shared_memory()

static inline void __syncthreads() { emulation::sync_block(); }
static inline void __threadfence() { emulation::fence(); }
static inline void spin() { emulation::let_others_run(); }

template <typename T>
T __shfl_xor_sync(uint32_t lanes, T value, int mask) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "");
  if (lanes != 0xffffffffu) emulation::fail(emulation::kDiverged, "shuffles with a part of its warp");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::shuffle_xor(bits, mask);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
T atomicAdd(T *place, T value) {
  emulation::about_to_change(place);
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicMax(T *place, T value) {
  emulation::about_to_change(place);
  T found = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (found < value && !__atomic_compare_exchange_n(place, &found, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return found;
}

// An atomic for the sanitizer, which still reports it beside a plain write that is not in order with it.
template <typename T>
T load_now(const T *place) {
  T value;
  __atomic_load(const_cast<T *>(place), &value, __ATOMIC_RELAXED);
  emulation::has_read(place);
  return value;
}
template <typename T>
T __ldg(const T *place) {
  if ((uintptr_t)place % sizeof(T)) emulation::fail(emulation::kMisaligned, "reads a vector that is not aligned");
  return *place;
}

template <typename T>
EMULATION_UNSEEN void multiply(float *sums, const uint32_t *w, const uint32_t *x, T) {
  emulation::Warp &warp = *emulation::current->warp;
  const int lane = emulation::current->lane;
  for (int i = 0; i < 4; ++i) warp.w[lane][i] = w[i];
  for (int i = 0; i < 2; ++i) warp.x[lane][i] = x[i];
  warp.sums[lane] = sums;
  if (emulation::is_last(warp, emulation::kMultiply, 0)) {
    emulation::multiply_warp<T>(warp);
    emulation::release(warp);
  } else {
    emulation::wait(warp);
  }
}
