/* AVX-512: several rows of x in the order in which transposed codes are unpacked. */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

/* 128 elements: 4 word + vector, the two of a byte exchanged, to [vector][word]. */
TARGET void qkv_order_nibbles(const uint16_t *x, __m512i *to)
{
    static const uint16_t words[32] = {0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
                                       0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
    __m512i iota = _mm512_loadu_si512(words);
    for (int v = 0; v < 4; ++v) {
        __m512i pick = _mm512_add_epi16(iota, _mm512_set1_epi16((short)(v ^ 1)));
        __m512i first = _mm512_permutex2var_epi16(_mm512_load_si512(x), pick, _mm512_load_si512(x + 32));
        __m512i second = _mm512_permutex2var_epi16(_mm512_load_si512(x + 64), pick, _mm512_load_si512(x + 96));
        to[v] = _mm512_mask_blend_epi16(0xffff0000u, first, second);
    }
}

/* Pairs of block `c` of a row of x, sixteen a vector; zeros past the row's end. */
TARGET static void order_block(const struct qkv_linear_job *job, ptrdiff_t row, ptrdiff_t c, int bits, __m512i *to)
{
    const int length = block_length(bits);
    __attribute__((aligned(64))) uint16_t halves[128];
    ptrdiff_t left = job->w.in - c * length, count = left < 0 ? 0 : left < length ? left : length;
    if (count) memcpy(halves, (const uint16_t *)job->x + row * job->w.in + c * length, (size_t)count * 2);
    memset(halves + count, 0, (size_t)(length - count) * 2);
    if (bits == 4) qkv_order_nibbles(halves, to);
    else for (int v = 0; v < 2; ++v) to[v] = _mm512_load_si512(halves + 32 * v);
}

/* Tiles [begin, end) of x. */
TARGET static void prepare_tiles(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    const struct qkv_linear_job *job = pointer;
    const int bits = bits_of(job), pairs = block_length(bits) / 2, vectors = pairs / 16;
    for (ptrdiff_t tile = begin; tile < end; ++tile) {
        ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
        __mmask16 mask = (__mmask16)((1u << M) - 1);
        int32_t *to = (int32_t *)job->px + start * pairs * job->chunks;
        for (ptrdiff_t c = 0; c < job->chunks; ++c, to += pairs * M) {
            __m512i held[4][16];
            memset(held, 0, sizeof held);
            for (ptrdiff_t m = 0; m < M; ++m) {
                __m512i ordered[4];
                order_block(job, start + m, c, bits, ordered);
                for (int v = 0; v < vectors; ++v) held[v][m] = ordered[v];
            }
            for (int v = 0; v < vectors; ++v) {
                transpose(held[v]);
                for (int i = 0; i < 16; ++i)
                    _mm512_mask_storeu_epi32(to + pair_at(bits, v, i) * M, mask, held[v][i]);
            }
        }
    }
}

int qkv_avx512_order(struct qkv_linear_job *job)
{
    const int length = block_length(bits_of(job));
    job->chunks = (job->w.groups * job->w.group + length - 1) / length;
    job->tiles = (job->rows + TILE_ROWS - 1) / TILE_ROWS;
    job->unit = WIDE;
    job->scratch = malloc((size_t)(job->chunks * length * job->rows) * 2 + 64);
    if (!job->scratch) return 0;
    job->px = (char *)(((uintptr_t)job->scratch + 63) & ~(uintptr_t)63);
    qkv_for(job->tiles, 1, job->tiles > 3 ? job->threads : 1, prepare_tiles, job);
    return 1;
}

#endif
