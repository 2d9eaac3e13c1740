// CUDA's threads on the CPU: each one is a fiber, which runs until it waits for others of its warp or block.
//
// The text of this file precedes the C++ of a source. It includes little and defines little, because each source is compiled
// on its own; fibers.cpp is compiled once.
inline Index gridDim;
#define __builtin_assume(fact)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class A> inline A max(A a, A b) { return a > b ? a : b; }
template <class A> inline A min(A a, A b) { return a < b ? a : b; }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }

struct Fiber {
    Index thread, block;
    int number, warp, lane;  // the number of the block among those that run together
    bool begun, done;
};
extern Fiber* current;
char* shared_memory();

void __syncthreads();
void __syncwarp();
inline void __threadfence() {}
long long clock64();
unsigned atomicAdd(unsigned* at, unsigned value);
int atomicMax(int* at, int value);
unsigned atomicInc(unsigned* at, unsigned most);
bool __any_sync(unsigned, bool own);
bool __all_sync(unsigned, bool own);
unsigned __reduce_max_sync(unsigned, unsigned own);
unsigned __shfl_xor_sync(unsigned, unsigned own, int by);
float __shfl_xor_sync(unsigned, float own, int by);
double __shfl_xor_sync(unsigned, double own, int by);
float __shfl_sync(unsigned, float own, int lane);
unsigned __shfl_down_sync(unsigned, unsigned own, int by);
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector);
unsigned larger_halves(unsigned most, unsigned pair);

unsigned __cvta_generic_to_shared(const void* pointer);
unsigned rank_in_cluster();
unsigned address_of_rank(unsigned address, unsigned rank);
void wait_for_cluster();

// A barrier that counts one arrival, and the bytes that arrive, in each phase.
struct Arrival {
    int bytes;
    short pending, phase;
    void check() {
        if (pending == 0 && bytes == 0) pending = 1, phase ^= 1;
    }
};
static_assert(sizeof(Arrival) == 8, "a word of 64 bits");
Arrival& arrival_at(unsigned address);
void expect(unsigned at, unsigned bytes);
void send_to(unsigned to, float x, float y, float z, float w, unsigned at);
bool has_phase_ended(unsigned at, unsigned parity);
void copy_to_shared(unsigned to, const void* from, int bytes, int existing);
uint4 load_transposed(unsigned row);
void wait_with_others(int number, int threads);
void load_from_shared(unsigned from, unsigned& x, unsigned& y, unsigned& z, unsigned& w);
void store_to_shared(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w);
void multiply_by_warpgroup(float* sums, int eights, const unsigned* a, unsigned long long description, bool adds, bool is_half);
void multiply_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_f16(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void multiply_bf16(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

// Runs all blocks, of which as many as `together` run beside each other, and the one with the number `slow` among these, if there
// is one, gets a turn far less often; returns whether all threads came to their end.
bool run_grid(Index grid, int threads, int bytes, unsigned together, int cluster, int slow, void (*entry)());
