// Copies pieces of memory in one launch: the blocks (x, y) copy piece y.
// Compile-time constant: PIECES, the number of pieces that the struct has room for.
struct Piece {
    const char* from;
    char* to;
    long long bytes;
};

struct Copies {
    Piece of[PIECES];
};

extern "C" __global__ void copy_pieces(const Copies p) {
    const Piece own = p.of[blockIdx.y];
    const long long first = blockIdx.x * blockDim.x + threadIdx.x, every = gridDim.x * blockDim.x;
    const bool wide = ((size_t)own.from | (size_t)own.to) % 16 == 0;
    const long long words = wide ? own.bytes / 16 : 0;  // of 16 bytes; what is left is copied byte by byte
    for (long long i = first; i < words; i += every) ((uint4*)own.to)[i] = ((const uint4*)own.from)[i];
    for (long long i = 16 * words + first; i < own.bytes; i += every) own.to[i] = own.from[i];
}
