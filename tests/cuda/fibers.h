// Threads of a launch as fibers of the thread that launches, for emulation.h.
//
// A fiber runs until it waits: for its warp, for its block, or for others at large while it spins. With a schedule other
// than 0 the order of fibers changes all the time and some warps are held back for a while. A launch that cannot go on
// ends with an error.

#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EMULATION_TSAN(call) call  // only for the thread sanitizer
#else
#define EMULATION_TSAN(call) ((void)0)
#endif
// For what is the emulation's own, and runs on fibers. It may use no containers, whose functions would be seen.
#define EMULATION_UNSEEN __attribute__((no_sanitize("thread"), noinline))

namespace emulation {

struct Index {
  unsigned x, y, z;
};
constexpr int kLanes = 32;
constexpr size_t kStack = 128 << 10, kGuard = 64;
constexpr unsigned char kPoison = 0xff;  // makes a NaN of fp32, bf16 and fp16
enum Error { kNone, kStuck = 1, kDiverged = 2, kMisaligned = 3, kOutOfBounds = 4, kInvalid = 5 };
enum Call { kSync, kShuffle, kMultiply };

struct Group {  // a warp or a block, whose fibers wait for one another
  int size = 0, arrived = 0, call = -1, detail = 0;
  unsigned generation = 0;
  char order[2] = {};  // stand for generations that have ended, in turns: no fiber can be two ahead of another
};
struct Warp : Group {
  uint64_t values[2][kLanes];  // of shuffles, in turns
  uint32_t w[kLanes][4], x[kLanes][2];
  float *sums[kLanes];
};
struct Block : Group {
  unsigned char *shared = nullptr;
};

struct Context {
  ucontext_t context;
#if defined(__SANITIZE_THREAD__)
  void *tsan = nullptr;
#else
  jmp_buf jump;  // `swapcontext` costs a system call
  bool started = true;  // as the scheduler always is
#endif
};
struct Fiber : Context {
  Index thread, block_index;
  int lane;
  Warp *warp;
  Block *block;
  int warp_number;
  const Group *waits_for = nullptr;
  unsigned generation = 0;  // that it waits to end
  bool done = false, fenced = false;
  const void *read = nullptr;  // by load_now

  bool waits() const { return waits_for && waits_for->generation == generation; }
};

static Index thread_index, block_index, block_size, grid_size;
static Context scheduler;
static Fiber *current;
static void (*body)(const void *);  // of a thread, and the call of the kernel that it is given
static const void *kernel_call;
static Error failure;
static long progress;
[[maybe_unused]] static char start_of_launch, end_of_launch;  // stand for what is in order at them

EMULATION_UNSEEN static void switch_to(Context &from, Context &to) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
  swapcontext(&from.context, &to.context);
#else
  if (_setjmp(from.jump)) return;
  if (to.started) _longjmp(to.jump, 1);
  to.started = true;
  setcontext(&to.context);
#endif
}

EMULATION_UNSEEN static void let_others_run() { switch_to(*current, scheduler); }

EMULATION_UNSEEN static void fail(Error error, const char *reason) {
  if (!failure) {
    std::fprintf(stderr, "emulation: block %u, thread %u: %s\n", current->block_index.x, current->thread.x, reason);
  }
  failure = error;
  let_others_run();  // for good
}

// While it lives, an address without memory is an error of the launch and not the end of the process.
class Segments {
 public:
  Segments() {
    struct sigaction caught = {};
    caught.sa_handler = [](int) { fail(kOutOfBounds, "reads or writes where there is no memory"); };
    caught.sa_flags = SA_NODEFER;  // the handler is left for good
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &caught, &before_[i]);
  }
  ~Segments() {
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr int kSignals[2] = {SIGSEGV, SIGBUS};
  struct sigaction before_[2];
};

// True for the one who comes last, for whom the others wait still: it is to call `release`.
EMULATION_UNSEEN static bool is_last(Group &group, Call call, int detail) {
  if (group.arrived == 0) {
    group.call = call;
    group.detail = detail;
  } else if (group.call != call || group.detail != detail) {
    fail(kDiverged, "is not where the others of its warp are");
  }
  ++progress;
  return ++group.arrived == group.size;
}
EMULATION_UNSEEN static void release(Group &group) {
  group.arrived = 0;
  ++group.generation;
}
EMULATION_UNSEEN static void wait(const Group &group) {
  current->waits_for = &group;
  current->generation = group.generation;
  let_others_run();
}

EMULATION_UNSEEN static void sync_block() {
  Block &block = *current->block;
  char *order = &block.order[block.generation % 2];
  EMULATION_TSAN(__tsan_release(order));
  if (is_last(block, kSync, 0)) {
    release(block);
  } else {
    wait(block);
  }
  EMULATION_TSAN(__tsan_acquire(order));
  (void)order;
}

EMULATION_UNSEEN static void start() {
  EMULATION_TSAN(__tsan_acquire(&start_of_launch));
  body(kernel_call);
  EMULATION_TSAN(__tsan_release(&end_of_launch));
  current->done = true;
  ++progress;
  let_others_run();
}

struct Random {  // xorshift, for which the standard's generators would take long to compile
  uint32_t state;  // not 0
  uint32_t operator()() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
};

// Runs the fibers to their end, or until none of them can go on.
inline Error run(std::vector<Fiber> &fibers, unsigned schedule) {
  std::vector<Fiber *> order;
  for (Fiber &fiber : fibers) order.push_back(&fiber);
  Random random{schedule * 2654435769u};
  unsigned held = 0;  // warps that do not run, by their number
  bool moved = true;
  size_t left = fibers.size();
  for (long round = 0; left; ++round) {
    for (size_t i = order.size(); schedule && i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    if (schedule && round % 64 == 0) held = random() & random();
    if (!moved) held = 0;
    const long before = progress;
    for (Fiber *fiber : order) {
      if (fiber->done || fiber->waits() || (held >> (fiber->warp_number % 32) & 1)) continue;
      current = fiber;
      thread_index = fiber->thread;
      block_index = fiber->block_index;
      switch_to(scheduler, *fiber);
      if (failure) return failure;
      left -= fiber->done;
    }
    if (!moved && progress == before) {
      std::fprintf(stderr, "emulation: deadlock: %zu threads wait for what never comes\n", left);
      return kStuck;
    }
    moved = progress != before;
  }
  return kNone;
}

inline void prepare(Fiber &fiber, char *stack) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, start, 0);
#if defined(__SANITIZE_THREAD__)
  fiber.tsan = __tsan_create_fiber(0);
#else
  fiber.started = false;
#endif
}

// The error of a launch; threads must be whole warps. A cooperative launch is no different.
template <typename Kernel, typename... Arguments>
int launch(Kernel *kernel, unsigned grid, unsigned block, size_t shared_bytes, unsigned schedule, Arguments... arguments) {
  static std::vector<char *> stacks;  // kept for the next launch
  if (!grid || !block || block % kLanes) return kInvalid;
  const auto call = [=] { kernel(arguments...); };
  body = [](const void *given) { (*(const decltype(call) *)given)(); };
  kernel_call = &call;
  std::vector<Fiber> fibers((size_t)grid * block);
  std::vector<Block> blocks(grid);
  std::vector<Warp> warps(fibers.size() / kLanes);
  while (stacks.size() < fibers.size()) stacks.push_back(new char[kStack]);
  const size_t shared_size = (shared_bytes + kGuard + 15) / 16 * 16;
  for (Block &each : blocks) {
    each.shared = (unsigned char *)std::aligned_alloc(16, shared_size);
    std::memset(each.shared, kPoison, shared_size);
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber &fiber = fibers[i];
    fiber.thread = {(unsigned)(i % block), 0, 0};
    fiber.block_index = {(unsigned)(i / block), 0, 0};
    fiber.lane = (int)(i % kLanes);
    fiber.warp_number = (int)(i / kLanes);
    fiber.warp = &warps[i / kLanes];
    fiber.block = &blocks[i / block];
    ++fiber.warp->size;
    ++fiber.block->size;
    prepare(fiber, stacks[i]);
  }
  block_size = {block, 1, 1};
  grid_size = {grid, 1, 1};
  failure = kNone;
  EMULATION_TSAN(scheduler.tsan = __tsan_get_current_fiber());
  EMULATION_TSAN(__tsan_release(&start_of_launch));
  Error error;
  {
    const Segments segments;
    error = run(fibers, schedule);
  }
  EMULATION_TSAN(__tsan_acquire(&end_of_launch));
  for (Fiber &fiber : fibers) {
    EMULATION_TSAN(__tsan_destroy_fiber(fiber.tsan));
    (void)fiber;
  }
  for (Block &each : blocks) {
    for (size_t i = shared_bytes; i < shared_size; ++i) {
      if (each.shared[i] != kPoison && !error) {
        std::fprintf(stderr, "emulation: byte %zu was written, of %zu of shared memory\n", i, shared_bytes);
        error = kOutOfBounds;
      }
    }
    std::free(each.shared);
  }
  return error;
}

}  // namespace emulation
