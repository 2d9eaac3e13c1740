// CUDA's threads on the CPU: each one is a fiber, which runs until it waits for others of its warp or block.
//
// Warps run in a random order, so that a missing barrier shows.
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <memory>
#include <ucontext.h>
#include <vector>

struct Barrier {
    int members, arrived = 0;
    long passed = 0;
};

struct Warp {
    Barrier barrier = {32};
    unsigned words[32][6];
};

struct Block {
    Barrier barrier, others[16];  // the others have numbers
    std::vector<Warp> warps;
    std::vector<float4> shared;
};

struct Running : Fiber {
    ucontext_t context;
    jmp_buf place;
    const Barrier* before;  // the barrier at which it waits, if it does, which others have passed so many times
    long passed;
    bool waits() const { return before && before->passed == passed; }
};

static std::vector<Running> fibers;
static std::vector<Block> blocks;
static std::vector<std::unique_ptr<char[]>> stacks;
Fiber* current;
static Running* running;
static jmp_buf scheduler;

static Block& own_block() { return blocks[current->number]; }
static Warp& own_warp() { return own_block().warps[current->warp]; }

// A fiber begins with setcontext; jumps are much faster than swapcontext, which calls the kernel to set signal masks.
__attribute__((noinline)) static void resume(Running& own) {
    if (_setjmp(scheduler)) return;
    if (own.begun) _longjmp(own.place, 1);
    own.begun = true;
    setcontext(&own.context);
}
__attribute__((noinline)) static void leave() {
    if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

static void wait(Barrier& barrier) {
    const long passed = barrier.passed;
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0, ++barrier.passed;
        return;
    }
    running->before = &barrier, running->passed = passed;
    leave();
    running->before = nullptr;
}

void __syncthreads() { wait(own_block().barrier); }
void __syncwarp() { wait(own_warp().barrier); }
long long clock64() {
    static long long now = 0;
    return now += 1000;
}

unsigned atomicAdd(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at += value;
    return before;
}
int atomicMax(int* at, int value) {
    const int before = *at;
    *at = max(before, value);
    return before;
}

unsigned atomicInc(unsigned* at, unsigned most) {
    const unsigned before = *at;
    *at = before >= most ? 0 : before + 1;
    return before;
}

// What a function returns for the warp when each lane has written a word.
template <class Function>
static auto of_warp(unsigned own, Function function) {
    Warp& warp = own_warp();
    warp.words[current->lane][0] = own;
    wait(warp.barrier);
    const auto found = function(warp.words);
    wait(warp.barrier);
    return found;
}

using Lanes = unsigned[32][6];
bool __any_sync(unsigned, bool own) {
    return of_warp(own, [](Lanes& all) { return std::any_of(all, all + 32, [](auto& each) { return each[0]; }); });
}
bool __all_sync(unsigned, bool own) {
    return of_warp(own, [](Lanes& all) { return std::all_of(all, all + 32, [](auto& each) { return each[0]; }); });
}
unsigned __reduce_max_sync(unsigned, unsigned own) {
    return of_warp(own, [](Lanes& all) { return (*std::max_element(all, all + 32, [](auto& a, auto& b) { return a[0] < b[0]; }))[0]; });
}
static unsigned from_lane(unsigned own, int lane) {
    return of_warp(own, [=](Lanes& all) { return all[lane & 31][0]; });
}
unsigned __shfl_xor_sync(unsigned, unsigned own, int by) { return from_lane(own, current->lane ^ by); }
float __shfl_xor_sync(unsigned, float own, int by) { return __uint_as_float(from_lane(__float_as_uint(own), current->lane ^ by)); }
double __shfl_xor_sync(unsigned, double own, int by) {
    unsigned words[2];
    std::memcpy(words, &own, 8);
    for (unsigned& word : words) word = from_lane(word, current->lane ^ by);
    std::memcpy(&own, words, 8);
    return own;
}
float __shfl_sync(unsigned, float own, int lane) { return __uint_as_float(from_lane(__float_as_uint(own), lane)); }
unsigned __shfl_down_sync(unsigned, unsigned own, int by) { return from_lane(own, min(current->lane + by, 31)); }

unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return word;
}

// The larger magnitude of each half of two words with two half-precision numbers; a NaN is ignored.
unsigned larger_halves(unsigned most, unsigned pair) {
    auto larger = [](unsigned one, unsigned other) { return other > 0x7c00 ? one : one > 0x7c00 ? other : max(one, other); };
    return larger(most & 0xffff, pair & 0x7fff) | larger(most >> 16, pair >> 16 & 0x7fff) << 16;
}

// Addresses in shared memory are bytes after the beginning of the block's part. Of variables outside of it, which are barriers
// of 8 bytes for each block, the address is their number. An address of another block of a cluster has its number, too.
constexpr unsigned OUTSIDE = 1u << 31, OF_BLOCK = 1u << 24;
static std::vector<const char*> outside;
char* shared_memory() { return (char*)own_block().shared.data(); }
unsigned __cvta_generic_to_shared(const void* pointer) {
    const long long place = (const char*)pointer - shared_memory();
    if (place >= 0 && place < (long long)own_block().shared.size() * 16) return place;
    const char* const first = (const char*)pointer - current->number * 8;
    const auto found = std::find(outside.begin(), outside.end(), first);
    const unsigned number = found - outside.begin();
    if (found == outside.end()) outside.push_back(first);
    return OUTSIDE | number;
}

// The blocks of a cluster follow each other.
static int cluster_size = 1;
static std::vector<Barrier> clusters;
unsigned rank_in_cluster() { return blockIdx.x % cluster_size; }
unsigned address_of_rank(unsigned address, unsigned rank) {
    return address | (current->number - rank_in_cluster() + rank + 1) * OF_BLOCK;
}
static char* pointer_to(unsigned address) {
    const unsigned block = address / OF_BLOCK % 128, number = block ? block - 1 : current->number;
    const unsigned place = address % OF_BLOCK;
    return address & OUTSIDE ? (char*)outside[place] + number * 8 : (char*)blocks[number].shared.data() + place;
}
void wait_for_cluster() { wait(clusters[current->number / cluster_size]); }

Arrival& arrival_at(unsigned address) { return *(Arrival*)pointer_to(address); }
void expect(unsigned at, unsigned bytes) {
    arrival_at(at).bytes += bytes, arrival_at(at).pending -= 1;
    arrival_at(at).check();
}
void send_to(unsigned to, float x, float y, float z, float w, unsigned at) {
    const float values[4] = {x, y, z, w};
    std::memcpy(pointer_to(to), values, 16);
    arrival_at(at).bytes -= 16;
    arrival_at(at).check();
}
bool has_phase_ended(unsigned at, unsigned parity) {
    if (arrival_at(at).phase != (short)parity) return true;
    leave();
    return false;
}
void copy_to_shared(unsigned to, const void* from, int bytes, int existing) {
    std::memset(shared_memory() + to, 0, bytes);
    std::memcpy(shared_memory() + to, from, existing);
}

uint4 load_transposed(unsigned row) {
    const int lane = current->lane;
    unsigned found[4];
    for (int matrix = 0; matrix < 4; ++matrix)
        found[matrix] = of_warp(row, [=](Lanes& all) {
            auto value = [&](int row) { return ((unsigned short*)(shared_memory() + all[matrix * 8 + row][0]))[lane / 4]; };
            return value(lane % 4 * 2) | (unsigned)value(lane % 4 * 2 + 1) << 16;
        });
    return {found[0], found[1], found[2], found[3]};
}

// A product of tensor cores of 16 x 8 values; a register has `PARTS` neighbouring values along the depth of 8 * PARTS.
template <int PARTS, class Number>
static void multiply_fragments(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Number number) {
    Warp& warp = own_warp();
    unsigned* const own = warp.words[current->lane];
    for (int i = 0; i < 4; ++i) own[i] = a[i];
    own[4] = b0, own[5] = b1;
    wait(warp.barrier);
    const int row = current->lane / 4, column = current->lane % 4 * 2;
    auto value = [&](int lane, int k, int index) { return number(warp.words[lane * 4 + k / PARTS % 4][index], k % PARTS); };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8 * PARTS; ++k) {
            const int later = k / (4 * PARTS);
            sum[i] += value(row, k, i / 2 + 2 * later) * value(column + i % 2, k, 4 + later);
        }
    wait(warp.barrier);
}
void multiply_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_fragments<1>(sum, a, b0, b1, [](unsigned word, int) { return __uint_as_float(word & 0xffffe000); });
}
void multiply_f16(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_fragments<2>(sum, a, b0, b1, [](unsigned word, int part) { return of_half(word >> 16 * part); });
}
void multiply_bf16(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_fragments<2>(sum, a, b0, b1, [](unsigned word, int part) { return __uint_as_float(word >> 16 * part << 16); });
}

// A product of a warpgroup, of which a warp computes 16 rows: with 8 * `eights` rows of a factor in shared memory, described as
// in warpgroup.cuh, of which the addresses are swizzled. `sums` has four for each eight rows.
void multiply_by_warpgroup(float* sums, int eights, const unsigned* a, unsigned long long description, bool adds, bool is_half) {
    Warp& warp = own_warp();
    unsigned* const own = warp.words[current->lane];
    for (int i = 0; i < 4; ++i) own[i] = a[i];
    wait(warp.barrier);
    const unsigned first = (description & 0x3fff) << 4, eighth = (description >> 32 & 0x3fff) << 4;
    const int row = current->lane / 4, column = current->lane % 4 * 2;
    auto number = [=](unsigned short bits) { return is_half ? of_half(bits) : __uint_as_float((unsigned)bits << 16); };
    for (int group = 0; group < eights; ++group)
        for (int i = 0; i < 4; ++i) {
            float total = adds ? sums[group * 4 + i] : 0;
            for (int k = 0; k < 16; ++k) {
                unsigned place = first + group * eighth + (column + i % 2) * 128 + k * 2;
                place ^= (place >> 7 & 7) << 4;
                unsigned short bits;
                std::memcpy(&bits, shared_memory() + place, 2);
                total += number(warp.words[row * 4 + k / 2 % 4][i / 2 + k / 8 * 2] >> 16 * (k % 2)) * number(bits);
            }
            sums[group * 4 + i] = total;
        }
    wait(warp.barrier);
}
void wait_with_others(int number, int threads) {
    Barrier& barrier = own_block().others[number];
    barrier.members = threads;
    wait(barrier);
}
void load_from_shared(unsigned from, unsigned& x, unsigned& y, unsigned& z, unsigned& w) {
    unsigned words[4];
    std::memcpy(words, shared_memory() + from, 16);
    x = words[0], y = words[1], z = words[2], w = words[3];
}
void store_to_shared(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w) {
    const unsigned words[4] = {x, y, z, w};
    std::memcpy(shared_memory() + to, words, 16);
}

static void (*entry)();
static void enter() {
    entry();
    current->done = true;
    leave();
}

// Runs blocks beside each other; returns whether all threads came to their end.
static bool run_together(const std::vector<Index>& places, int threads, int bytes, int slow) {
    constexpr int STACK = 1 << 16, MOST_ROUNDS = 1 << 22, SLOWER = 32;
    blocks.assign(places.size(), {});
    clusters.assign(places.size() / cluster_size, {cluster_size * threads});
    fibers.assign(places.size() * threads, {});
    while (stacks.size() < fibers.size()) stacks.emplace_back(new char[STACK]);
    for (size_t number = 0; number < places.size(); ++number) {
        blocks[number].barrier.members = threads;
        blocks[number].warps.resize(threads / 32);
        const float nothing = __uint_as_float(0x7fc00000u);
        blocks[number].shared.assign(bytes / 16 + 1, {nothing, nothing, nothing, nothing});
        for (int thread = 0; thread < threads; ++thread) {
            Running& own = fibers[number * threads + thread];
            own.thread = {(unsigned)thread, 0, 0}, own.block = places[number];
            own.number = number, own.warp = thread / 32, own.lane = thread % 32, own.begun = own.done = false;
            own.before = nullptr;
            getcontext(&own.context);
            own.context.uc_stack.ss_sp = stacks[&own - fibers.data()].get(), own.context.uc_stack.ss_size = STACK;
            makecontext(&own.context, enter, 0);
        }
    }
    const unsigned groups = fibers.size() / 32;
    unsigned random = 1;
    for (int round = 0; round < MOST_ROUNDS; ++round) {
        random = random * 1664525 + 1013904223;
        const unsigned first = (random >> 8) % groups * 32;
        const bool waits = fibers[first].number == slow && round % SLOWER;
        for (unsigned i = first; i < first + 32; ++i) {
            if (fibers[i].done || waits || fibers[i].waits()) continue;
            current = running = &fibers[i], threadIdx = current->thread, blockIdx = current->block;
            resume(*running);
        }
        if (round % 64 == 0 && std::all_of(fibers.begin(), fibers.end(), [](auto& each) { return each.done; })) return true;
    }
    return false;
}

bool run_grid(Index grid, int threads, int bytes, unsigned together, int cluster, int slow, void (*of_thread)()) {
    entry = of_thread, cluster_size = cluster, gridDim = grid, blockDim = {(unsigned)threads, 1, 1};
    const unsigned count = grid.x * grid.y * grid.z;
    std::vector<Index> places;
    for (unsigned number = 0; number < count; ++number) {
        places.push_back({number % grid.x, number / grid.x % grid.y, number / (grid.x * grid.y)});
        if (places.size() < together && number + 1 < count) continue;
        if (!run_together(places, threads, bytes, slow)) return false;
        places.clear();
    }
    return true;
}
