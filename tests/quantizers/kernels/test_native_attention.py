"""The native attention's memory accesses; its results are tested beside the cache that it serves."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from qkv.quantizers.kernels.native_attention import Call, Exact, Side
from tests.quantizers.kernels.sanitize import run_sanitized

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include "attention.h"

int qkv_set_level(int), qkv_attention(const struct qkv_attention *);
int64_t qkv_attention_room(const struct qkv_attention *);

static unsigned state = 1;
static unsigned draw(unsigned below) { return (state = state * 1664525u + 1013904223u) / 65536 % below; }
static void *held[64];
static int count;
static void *noise(size_t bytes) /* exactly as long as it must be */
{
    unsigned char *at = held[count++] = malloc(bytes ? bytes : 1);
    for (size_t i = 0; i < bytes; ++i) at[i] = (unsigned char)draw(60);
    return at;
}

static void make_side(struct qkv_side *side, int64_t dtype, int64_t block)
{
    static const int bits[] = {0, 8, 4, 2, 4};
    int64_t extent;
    side->dim = 1 + draw(140);
    side->codec = draw(5), side->dtype = dtype, side->by_token = draw(2), side->rotated = draw(2);
    extent = side->by_token ? side->dim : block;
    for (side->group = 1 + draw((unsigned)extent); extent % side->group; --side->group) {}
    side->row_bytes = side->codec ? (side->dim * bits[side->codec] + 7) / 8 : side->dim * (dtype ? 2 : 4);
}

static void make_exact(struct qkv_exact *exact, const struct qkv_attention *call, int64_t tokens)
{
    exact->tokens = tokens, exact->dtype = call->dtype;
    for (int part = 0; part < 2; ++part) {
        int64_t dim = call->side[part].dim;
        exact->token_stride[part] = dim, exact->head_stride[part] = dim * tokens;
        exact->data[part] = noise((size_t)(call->heads * tokens * dim * (call->dtype ? 2 : 4)));
    }
}

int main(void)
{
    for (int round = 0; round < 1500; ++round) {
        int level = qkv_set_level(round % 3);
        struct qkv_attention call = {.heads = 1 + draw(3), .group = 1 + draw(6), .tokens = 1 + draw(16)};
        call.dtype = draw(3), call.level = level;
        call.block_size = 1 + draw(90), call.scale = 0.1f, call.softcap = draw(2) ? 3.0f : 0.0f, call.threads = 1;
        make_side(&call.side[0], call.dtype, call.block_size), make_side(&call.side[1], call.dtype, call.block_size);
        call.num_runs = draw(4);
        struct qkv_run *runs = noise((size_t)call.num_runs * sizeof *runs);
        for (int64_t i = 0; i < call.num_runs; ++i) {
            runs[i].blocks = 1 + draw(3), runs[i].tokens = call.block_size;
            for (int part = 0; part < 2; ++part) {
                const struct qkv_side *side = &call.side[part];
                size_t blocks = (size_t)(runs[i].blocks * call.heads), rows = (size_t)call.block_size;
                size_t scales = blocks * (side->by_token ? rows * (size_t)(side->dim / side->group)
                                                         : rows / (size_t)side->group * (size_t)side->dim);
                runs[i].codes[part] = noise(blocks * rows * (size_t)side->row_bytes);
                runs[i].scale[part] = side->codec ? noise(2 * scales) : NULL;
                runs[i].zero[part] = side->codec && side->codec != QKV_LEVEL4 ? noise(2 * scales) : NULL;
            }
            call.num_blocks += runs[i].blocks;
        }
        call.runs = runs;
        int64_t *starts = noise((size_t)call.num_blocks * 8), *positions = noise((size_t)call.tokens * 8);
        for (int64_t i = 0; i < call.num_blocks; ++i) starts[i] = i * call.block_size;
        call.tail_start = call.num_blocks * call.block_size, call.num_open = call.tokens;
        make_exact(&call.tail, &call, call.tokens + draw(90));
        if (draw(2)) make_exact(&call.anchors, &call, 1 + draw(9));
        size_t heads = (size_t)(call.heads * call.group), tokens = (size_t)call.tokens;
        size_t dim = (size_t)call.side[0].dim;
        int64_t begin = call.tail_start + call.tail.tokens - call.tokens;
        for (size_t i = 0; i < tokens; ++i) positions[i] = begin + (int64_t)i;
        call.starts = starts, call.positions = positions;
        call.query_head_stride = call.tokens * call.side[0].dim, call.query_token_stride = call.side[0].dim;
        call.queries = noise(heads * tokens * dim * (call.dtype ? 2 : 4));
        call.anchor_queries = draw(2) ? noise(heads * tokens * dim * 4) : NULL;
        call.output = noise(heads * tokens * (size_t)call.side[1].dim * (call.dtype ? 2 : 4));
        call.open_mask = draw(2) ? noise(tokens * tokens) : NULL;
        call.sink_logits = draw(2) ? noise(heads * 4) : NULL;
        call.reach = draw(2) ? 1 + draw(200) : 0, call.hidden = draw(2) ? draw(9) : 0, call.sinks = draw(9);
        if (draw(2)) {
            int64_t columns = call.num_blocks + (call.tail.tokens + call.block_size - 1) / call.block_size;
            call.mass = noise(tokens * (size_t)columns * 4), call.focus = noise(tokens * (size_t)columns * 4);
        }
        call.room = noise((size_t)qkv_attention_room(&call) * 4);
        if (qkv_attention(&call)) return 1;
        while (count) free(held[--count]);
    }
    printf("%s\n", "clean");
    return 0;
}
"""
SIZES = r"""
#include <stdio.h>
#include "attention.h"

int main(void)
{
    FILE *file = fopen("%s", "w");
    fprintf(file, "%%zu %%zu %%zu", sizeof(struct qkv_side), sizeof(struct qkv_exact), sizeof(struct qkv_attention));
    fclose(file);
    puts("clean");
    return 0;
}
"""


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    run_sanitized(DRIVER, tmp_path)


@pytest.mark.slow
def test_the_structures_are_those_of_the_header(tmp_path: Path) -> None:
    run_sanitized(SIZES % (tmp_path / "sizes"), tmp_path)
    assert (tmp_path / "sizes").read_text().split() == [str(ctypes.sizeof(kind)) for kind in (Side, Exact, Call)]
