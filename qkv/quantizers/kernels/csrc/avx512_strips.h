/* Products of several rows of x, on AVX-512 with BF16: what the kernels for few rows and for many share.
 *
 * Thirty-two output features are worked on together, as two strips of sixteen. A strip's codes are transposed as they
 * are stored, 32 bits a lane, so that a lane holds an output feature and no sum has to be added up across lanes; then
 * they are unpacked to pairs of bf16 without their scales: exact for integer codes, zero point included, while the
 * levels of nf4 are rounded. The sums over a group are scaled in fp32.
 */
#ifndef QKV_AVX512_STRIPS_H
#define QKV_AVX512_STRIPS_H

#include <stdlib.h>

#include "avx512.h"

enum {
    WIDE = 32,     /* output features that are worked on together */
    TILE_ROWS = 12 /* rows of x whose sums fit the registers beside the codes */
};

/* For nine to twelve rows of x (8-bit codes: two to twelve), and for more. */
qkv_body qkv_avx512_few(const struct qkv_linear_job *job);
qkv_body qkv_avx512_many(const struct qkv_linear_job *job);

QKV_INLINE int bits_of(const struct qkv_linear_job *job) { return job->w.kind == QKV_INT8 ? 8 : 4; }

/* A block is 64 bytes of codes, a unit four bytes: so many elements. */
QKV_INLINE int block_length(int bits) { return 512 / bits; }
QKV_INLINE int unit_length(int bits) { return 32 / bits; }

QKV_INLINE ptrdiff_t tile_start(const struct qkv_linear_job *job, ptrdiff_t tile)
{
    return tile * job->rows / job->tiles;
}

/* Where in a block's pairs lane `lane` of vector `v` of ordered x belongs. */
QKV_INLINE int pair_at(int bits, int v, int lane) { return bits == 4 ? 4 * lane + v : 16 * v + lane; }

/* ---- sixteen by sixteen ---- */

INLINE void transpose(__m512i *rows)
{
    __m512i a[16], b[16];
    QKV_UNROLL
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    QKV_UNROLL
    for (int i = 0; i < 16; i += 4) {
        QKV_UNROLL
        for (int k = 0; k < 2; ++k) {
            b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + k + 2]);
            b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + k + 2]);
        }
    }
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) {
        __m512i even_low = _mm512_shuffle_i64x2(b[i], b[i + 4], 0x88), odd_low = _mm512_shuffle_i64x2(b[i], b[i + 4], 0xdd);
        __m512i even_high = _mm512_shuffle_i64x2(b[i + 8], b[i + 12], 0x88);
        __m512i odd_high = _mm512_shuffle_i64x2(b[i + 8], b[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i64x2(even_low, even_high, 0x88);
        rows[i + 4] = _mm512_shuffle_i64x2(odd_low, odd_high, 0x88);
        rows[i + 8] = _mm512_shuffle_i64x2(even_low, even_high, 0xdd);
        rows[i + 12] = _mm512_shuffle_i64x2(odd_low, odd_high, 0xdd);
    }
}

/* ---- strips ---- */

/* Where the rows of sixteen output features begin. */
struct strip {
    const uint8_t *codes[16], *zero[16];
    const float *scale[16];
};

INLINE struct strip strip_at(const struct qkv_linear_job *job, ptrdiff_t row, ptrdiff_t end)
{
    const struct qkv_weight *w = &job->w;
    struct strip strip;
    for (int r = 0; r < 16; ++r) {
        ptrdiff_t at = row + r < end ? row + r : end - 1; /* the last one fills what is left */
        strip.codes[r] = w->codes + at * w->groups * w->group_bytes;
        strip.scale[r] = w->scale + at * w->groups;
        strip.zero[r] = w->zero ? w->zero + at * w->groups : NULL;
    }
    return strip;
}

enum { FETCHED_AHEAD = 1024 }; /* bytes of a row, to the second cache: sixteen rows crowd each other out of the first */

/* Block `c` of a strip, transposed: `to[i]` holds unit i of each output feature. */
TARGET static __attribute__((noinline, unused)) void load_block(const struct qkv_linear_job *job,
                                                                const struct strip *strip, ptrdiff_t c, __m512i *to)
{
    const ptrdiff_t bytes = job->w.groups * job->w.group_bytes, left = bytes - 64 * c, next = 64 * c + FETCHED_AHEAD;
    const ptrdiff_t fetch = next < bytes ? next : next + (WIDE - 1) * bytes; /* the rows to come, at the row's end */
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i rows[16];
    QKV_UNROLL
    for (int r = 0; r < 16; ++r) rows[r] = _mm512_maskz_loadu_epi8(mask, strip->codes[r] + 64 * c);
    QKV_UNROLL
    for (int r = 0; r < 16; ++r) _mm_prefetch((const char *)strip->codes[r] + fetch, _MM_HINT_T1);
    transpose(rows);
    QKV_UNROLL
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i, rows[i]);
}

/* ---- unpacking ---- */

/* bf16 of -15 ... 16: what a code less its zero point can be. */
INLINE __m512i difference_table(void)
{
    __attribute__((aligned(64))) uint16_t table[32];
    for (int i = 0; i < 32; ++i) table[i] = (uint16_t)(qkv_bits((float)(i - 15)) >> 16);
    return _mm512_load_si512(table);
}

INLINE __m512i table_of(const struct qkv_weight *w, const int bits, const int zero)
{
    return bits == 8 ? _mm512_setzero_si512() : zero ? difference_table() : qkv_halved_levels(w);
}

/* Code `k` of each lane less its zero point, as fp32. */
INLINE __m512i number8(__m512i raw, const int k, __m512i offset, const int zero)
{
    __m512i top = k < 3 ? _mm512_slli_epi32(raw, 24 - 8 * k) : raw;
    top = zero ? _mm512_sub_epi32(_mm512_srli_epi32(top, 24), offset) : _mm512_srai_epi32(top, 24);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(top));
}

/* Pair `v` of a unit as bf16. Eight bits: neighbours, of eight significant bits, so that nothing is rounded. */
INLINE __m512i unpack(__m512i raw, const int v, __m512i table, __m512i offset, const int bits, const int zero)
{
    if (bits == 8) {
        __m512i low = number8(raw, 2 * v, offset, zero), high = number8(raw, 2 * v + 1, offset, zero);
        return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
    }
    __m512i index = v ? _mm512_srli_epi16(raw, 4 * v) : raw;
    if (zero) index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), offset);
    return _mm512_permutexvar_epi16(index, table);
}

/* ---- scales, and the end ---- */

/* Scales of sixteen output features to [group][32]. */
INLINE void order_scales(const struct qkv_linear_job *job, const struct strip *strip, float *to)
{
    for (ptrdiff_t g = 0; g < job->w.groups; g += 16) {
        ptrdiff_t held = job->w.groups - g < 16 ? job->w.groups - g : 16;
        __m512i rows[16];
        for (int r = 0; r < 16; ++r)
            rows[r] = _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)((1u << held) - 1), strip->scale[r] + g));
        transpose(rows);
        for (ptrdiff_t i = 0; i < held; ++i) _mm512_store_si512(to + (g + i) * WIDE, rows[i]);
    }
}

/* Zero points likewise, twice in 16 bits: what is added to a four-bit code to find it in the table, or taken from one of
 * eight bits. */
INLINE void order_zeros(const struct qkv_linear_job *job, const struct strip *strip, int32_t *to, const int bits)
{
    for (ptrdiff_t g = 0; g < job->w.groups; ++g)
        for (int r = 0; r < 16; ++r) {
            int32_t point = strip->zero[r][g];
            to[g * WIDE + r] = (bits == 8 ? point : 15 - point) * 0x10001;
        }
}

/* Rounds the sums of a panel and adds the bias: `held` output features from `row` on. */
TARGET static __attribute__((unused)) void finish(const struct qkv_linear_job *job, const float *total, ptrdiff_t row, ptrdiff_t held)
{
    __attribute__((aligned(64))) float bias[WIDE] = {0};
    for (ptrdiff_t r = 0; job->bias && r < held; ++r) bias[r] = qkv_load(job->bias, job->bias_dtype, row + r);
    for (ptrdiff_t m = 0; m < job->rows; ++m, total += WIDE)
        for (ptrdiff_t r = 0; r < held; r += 16) {
            __mmask16 mask = held - r >= 16 ? 0xffff : (__mmask16)((1u << (held - r)) - 1);
            __m512 value = _mm512_add_ps(_mm512_load_ps(total + r), _mm512_load_ps(bias + r));
            _mm256_mask_storeu_epi16((uint16_t *)job->y + m * job->w.out + row + r, mask,
                                     (__m256i)_mm512_cvtneps_pbh(value));
        }
}

#endif
