// The polls of a product in flight as copies to shared memory: more of them than registers have room for, and in whole lines of
// the cache, because it does not matter which lane copies what.
//
// The first SPARE polls of a step have memory of their own, which the last polls use again. The others lie at the end of the
// memory of the warp's sums of the same step: it is free until the sums of a group of eight rows are stored, and these overwrite
// nothing but polls that have been multiplied.
//
// product.cuh includes this file, whose names it takes.
#pragma once

constexpr int PIECES = 4 * CHUNK;                    // of 16 bytes: those of a batch row in a poll
constexpr int GROUP_BYTES = 8 * PARTIAL_STRIDE * 4;  // of the sums of eight rows

// The place of a poll among those in the memory of the sums, in bytes.
__device__ constexpr int place_in_sums(int item) { return NEIGHBOURS * GROUP_BYTES - (COPIED - item) * ITEM_BYTES; }

__device__ constexpr bool sums_overwrite_nothing() {
    for (int group = 0; group < NEIGHBOURS; ++group)
        for (int item = SPARE; item < COPIED; ++item)
            if (place_in_sums(item) < 0 || (item >= (group + 1) * POLLS && place_in_sums(item) < (group + 1) * GROUP_BYTES)) return false;
    return true;
}
static_assert(COPIED <= ITEMS && ITEMS <= COPIED + SPARE && sums_overwrite_nothing(), "as in copied_loads.py");

// The place of 16 bytes in a poll: halves of lines change places in every other row, so that reads have no bank conflicts.
__device__ __forceinline__ int place_in_item(int row, int piece) {
    return (row * PIECES + (CHUNK % 2 ? piece : piece ^ (row & 1) << 2)) * 16;
}

struct InFlight {
    char* spare;  // the warp's memory for SPARE polls

    // `memory` is that of all warps, of SPARE_BYTES.
    __device__ __forceinline__ explicit InFlight(char* memory) : spare(memory + (threadIdx.x >> 5) * SPARE * ITEM_BYTES) {}

    // The memory of a poll; `sums` is that of the warp's sums in its step.
    __device__ __forceinline__ char* memory_of(int item, float* sums) const {
        const bool own = item < SPARE || item >= COPIED;
        return own ? spare + (item < COPIED ? item : item - COPIED) * ITEM_BYTES : (char*)sums + place_in_sums(item);
    }

    // Begins to copy an item, in a group of copies of its own.
    template <class RowOf>
    __device__ __forceinline__ void copy(RowOf row_of, int item, float* sums) const {
        char* const to = memory_of(item, sums);
        const int poll = item % POLLS, first = (threadIdx.x >> 5) * SPANS * SPAN;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            const int number = c * 32 + (threadIdx.x & 31), row = number / PIECES, piece = number % PIECES;
            const int depth = first + piece * (SPAN / 4), further = poll * CHUNK * SPAN;
            const Row from = row_of(item / POLLS * 8 + row, depth);
            const bool exists = (SPANS % CHUNK == 0 || poll * CHUNK + piece / 4 < SPANS) && (WARPS * SPANS * SPAN <= WIDTH || depth + further < WIDTH);
            begin_copy<16>(to + place_in_item(row, piece), from.data + further, exists && (!RAGGED || from.counted));
        }
        end_group_of_copies();
    }

    // Waits for the copy of an item, behind which there are always COPIED - 1 groups.
    __device__ __forceinline__ void arrive(uint4 (&words)[CHUNK], int item, float* sums) const {
        wait_for_copies<COPIED - 1>();
        __syncwarp();
        const char* const from = memory_of(item, sums);
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) words[c] = *(const uint4*)(from + place_in_item(lane >> 2, c * 4 + (lane & 3)));
    }

    // Reads the values of an item, when they have arrived. Where they are missing, they are polled, and all later items in flight
    // are copied again, because they are probably missing, too.
    template <class RowOf>
    __device__ __forceinline__ void await(uint4 (&words)[CHUNK], RowOf row_of, int item, float* sums, Patience& patience) const {
        arrive(words, item, sums);
        const Row row = row_of(row_of_lane(item / POLLS), depth_of(0));
        if (!is_missing(words, row)) return;
        await_item(words, row, item % POLLS, patience);
        wait_for_copies<0>();
#pragma unroll 1
        for (int later = item + 1; later < item + COPIED; ++later) {
            if (later < ITEMS)
                copy(row_of, later, sums);
            else
                end_group_of_copies();
        }
    }

    // Begins to copy a later item to the memory of an item, which all lanes have read.
    template <class RowOf>
    __device__ __forceinline__ void follow(RowOf row_of, int item) const {
        if (item < SPARE && item + COPIED < ITEMS)
            copy(row_of, item + COPIED, nullptr);
        else
            end_group_of_copies();
    }

    // Has nothing in flight.
    __device__ __forceinline__ void end() const {
        wait_for_copies<0>();
        __syncwarp();
    }
};

// Issues the first copies of a step, at the end of the step before, with memory of the warp's sums in that step.
template <class RowAt>
__device__ __forceinline__ void begin_product(const InFlight& words, RowAt row_at, int step, float* sums = nullptr) {
    auto row_of = [&](int row, int depth) { return row_at(row, depth, step); };
    __syncwarp();  // another lane may have stored sums of a repeated product
#pragma unroll
    for (int item = 0; item < COPIED; ++item) words.copy(row_of, item, sums);
}
