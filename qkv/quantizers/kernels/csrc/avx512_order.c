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

/* Pairs of block `c` of a row of x for 4-bit codes, sixteen a vector; zeros past the row's end. */
TARGET static void order_block(const struct qkv_linear_job *job, ptrdiff_t row, ptrdiff_t c, __m512i *to)
{
    __attribute__((aligned(64))) uint16_t halves[128];
    ptrdiff_t left = job->w.in - c * 128, count = left < 0 ? 0 : left < 128 ? left : 128;
    if (count) memcpy(halves, (const uint16_t *)job->x + row * job->w.in + c * 128, (size_t)count * 2);
    memset(halves + count, 0, (size_t)(128 - count) * 2);
    qkv_order_nibbles(halves, to);
}

/* Sixteen elements of x as fp32; zeros past the row's end. */
INLINE __m512 load_x(const struct qkv_linear_job *job, ptrdiff_t row, ptrdiff_t at)
{
    ptrdiff_t left = job->w.in - at;
    __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)job->x + row * job->w.in + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* The same in 16 bits, the pairs one element apart; the factors back to `factor`, which NaN and infinity spoil. */
TARGET static void order_words(const struct qkv_linear_job *job, ptrdiff_t row, ptrdiff_t c, float *factor, __m512i *to)
{
    const int wide = job->segment / 16;
    __m512 value[4];
    for (int j = 0; j < 4; ++j) value[j] = load_x(job, row, 64 * c + 16 * j);
    for (int j = 0; j < 4; j += wide, factor += TILE_ROWS) {
        __m512 size = _mm512_setzero_ps(), spoilt = size;
        for (int k = j; k < j + wide; ++k) {
            size = _mm512_max_ps(size, _mm512_abs_ps(value[k]));
            spoilt = _mm512_add_ps(spoilt, _mm512_sub_ps(value[k], value[k]));
        }
        float absmax = _mm512_reduce_max_ps(size), inverse = absmax > 1e-30f && absmax <= FLT_MAX ? 32767.0f / absmax : 0;
        *factor = absmax / 32767.0f + _mm512_reduce_add_ps(spoilt);
        for (int k = j; k < j + wide; ++k) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(value[k], _mm512_set1_ps(inverse)));
            __m512i third = _mm512_slli_epi32(_mm512_shuffle_epi32(whole, 0x0e), 16);
            __m512i pairs = _mm512_or_si512(_mm512_and_si512(whole, _mm512_set1_epi32(0xffff)), third);
            pairs = _mm512_maskz_compress_epi32(0x3333, pairs);
            _mm256_store_si256((__m256i *)to + k, _mm512_castsi512_si256(pairs));
        }
    }
}

/* Where in a block's pairs lane `lane` of vector `v` of ordered x belongs. */
QKV_INLINE int pair_at(int bits, int v, int lane) { return bits == 4 ? 4 * lane + v : 16 * v + lane; }

/* Tiles [begin, end) of x. */
TARGET static void prepare_tiles(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    const struct qkv_linear_job *job = pointer;
    const int bits = bits_of(&job->w), pairs = block_length(bits) / 2, vectors = pairs / 16;
    const ptrdiff_t factors = job->segment ? 64 / job->segment * TILE_ROWS : 0; /* of a block */
    for (ptrdiff_t tile = begin; tile < end; ++tile) {
        ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
        __mmask16 mask = (__mmask16)((1u << M) - 1);
        int32_t *to = tile_pairs(job, tile);
        for (ptrdiff_t c = 0; c < job->chunks; ++c, to += pairs * M) {
            __m512i held[4][16];
            memset(held, 0, sizeof held);
            for (ptrdiff_t m = 0; m < M; ++m) {
                __m512i ordered[4];
                if (bits == 8) order_words(job, start + m, c, tile_factors(job, tile) + c * factors + m, ordered);
                else order_block(job, start + m, c, ordered);
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

/* x in element pairs, [tile][pair][row of the tile]. */
int qkv_order_tiles(struct qkv_linear_job *job)
{
    const int bits = bits_of(&job->w), length = block_length(bits), one = job->w.groups == 1;
    job->chunks = (job->w.groups * job->w.group + length - 1) / length;
    job->tiles = (job->rows + TILE_ROWS - 1) / TILE_ROWS;
    job->segment = bits == 4 ? 0 : one || job->w.group % 64 == 0 ? 64 : job->w.group % 32 == 0 ? 32 : 16;
    const ptrdiff_t x_bytes = job->chunks * length * job->rows * 2;
    const ptrdiff_t factors = job->segment ? job->tiles * job->chunks * (64 / job->segment) * TILE_ROWS : 0;
    job->scratch = malloc((size_t)(x_bytes + factors * 4) + 64);
    if (!job->scratch) return 0;
    job->px = (char *)(((uintptr_t)job->scratch + 63) & ~(uintptr_t)63);
    job->psum = (float *)((char *)job->px + x_bytes);
    qkv_for(job->tiles, 1, job->tiles > 3 ? job->threads : 1, prepare_tiles, job);
    return 1;
}

#endif
