/* Attention over blocks: cuts the work into items, walks their tiles, merges what they found. */
#include <stdlib.h>

#include "attention.h"

static const float NOTHING = -1e30f; /* the peak of a row that has seen nothing yet */

/* ---- layout of the room: what outlives an item ---- */

struct plan {
    const struct qkv_attention *call;
    const struct qkv_attention_ops *ops;
    ptrdiff_t rows, span, ranges, items, columns; /* span: blocks of a range; columns: of the mass */
    float *output;         /* [items, rows, value dim] */
    float *peak, *total;   /* [items, rows]; after the merge, peak holds each item's factor */
    float *mass, *focus;   /* [heads, rows, columns], against the item's peak */
    int no_memory;
};

static ptrdiff_t ceiling(ptrdiff_t count, ptrdiff_t step) { return (count + step - 1) / step; }

/* Ranges of about a thousand tokens, and sixteen of them at most. */
static struct plan cut(const struct qkv_attention *call)
{
    struct plan plan = {.call = call, .rows = call->group * call->tokens};
    ptrdiff_t least = ceiling(1024, call->block_size), sixteenth = ceiling(call->num_blocks, 16);
    plan.span = least > sixteenth ? least : sixteenth;
    plan.ranges = ceiling(call->num_blocks, plan.span);
    plan.items = call->heads * (1 + plan.ranges);
    plan.columns = call->num_blocks + ceiling(call->tail.tokens, call->block_size);
    return plan;
}

static ptrdiff_t place(struct plan *plan)
{
    const struct qkv_attention *call = plan->call;
    ptrdiff_t states = plan->items * plan->rows, marks = call->mass ? call->heads * plan->rows * plan->columns : 0;
    plan->output = call->room;
    plan->peak = plan->output + states * call->side[QKV_VALUES].dim;
    plan->total = plan->peak + states;
    plan->mass = plan->total + states;
    plan->focus = plan->mass + marks;
    return states * (call->side[QKV_VALUES].dim + 2) + 2 * marks;
}

/* ---- rotation ---- */

/* The normalised Hadamard matrix over blocks of the largest power of two that divides `dim`. */
static void spread(float *x, ptrdiff_t dim)
{
    ptrdiff_t size = dim & -dim;
    for (ptrdiff_t width = 1; width < size; width *= 2)
        for (ptrdiff_t start = 0; start < dim; start += 2 * width)
            for (ptrdiff_t i = start; i < start + width; ++i) {
                float a = x[i], b = x[i + width];
                x[i] = a + b;
                x[i + width] = a - b;
            }
    float scale = 1.0f;
    for (ptrdiff_t left = size; left > 1; left /= 4) scale *= left == 2 ? 0.70710678f : 0.5f;
    for (ptrdiff_t i = 0; i < dim; ++i) x[i] *= scale;
}

/* ---- a worker ---- */

/* Returns the memory to free, or NULL. */
static void *hire(struct qkv_worker *w, const struct plan *plan)
{
    const struct qkv_attention *call = plan->call;
    *w = (struct qkv_worker){.call = call, .rows = plan->rows};
    w->key_width = ceiling(call->side[QKV_KEYS].dim, 64) * 64;
    w->value_width = ceiling(call->side[QKV_VALUES].dim, 64) * 64;
    ptrdiff_t wide = w->key_width + w->value_width + QKV_TILE, each = ceiling(w->rows, 16) * 64;
    char *memory = malloc((size_t)(w->rows * wide * 4 + 5 * each + plan->ops->room(w) + 128));
    if (!memory) return NULL;
    char *at = (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    w->queries = carve(&at, w->rows * w->key_width * 4);
    w->output = carve(&at, w->rows * w->value_width * 4);
    w->scores = carve(&at, w->rows * QKV_TILE * 4);
    float **vectors[] = {&w->peak, &w->total, &w->shrink, &w->sum, &w->square};
    for (int i = 0; i < 5; ++i) *vectors[i] = carve(&at, each);
    w->room = at;
    return memory;
}

static void begin(struct qkv_worker *w)
{
    for (ptrdiff_t r = 0; r < w->rows; ++r) w->peak[r] = NOTHING, w->total[r] = 0.0f;
    memset(w->output, 0, (size_t)(w->rows * w->value_width) * sizeof *w->output);
}

/* The queries of a head for the blocks or the tail; `turned`: those for the anchors. */
static void load_queries(struct qkv_worker *w, ptrdiff_t head, int turned, int rotated)
{
    const struct qkv_attention *call = w->call;
    ptrdiff_t dim = call->side[QKV_KEYS].dim;
    w->bf16_queries = call->dtype == QKV_BF16 && !turned && !rotated;
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        float *to = w->queries + r * w->key_width;
        ptrdiff_t query = head * call->group + r / call->tokens, token = r % call->tokens;
        ptrdiff_t from = query * call->query_head_stride + token * call->query_token_stride;
        if (turned) memcpy(to, call->anchor_queries + (query * call->tokens + token) * dim, (size_t)dim * sizeof *to);
        else for (ptrdiff_t i = 0; i < dim; ++i) to[i] = qkv_load(call->queries, (int)call->dtype, from + i);
        if (rotated) spread(to, dim);
        memset(to + dim, 0, (size_t)(w->key_width - dim) * sizeof *to);
    }
}

/* ---- mass ---- */

struct marks {
    float *sum, *square, *peak; /* [rows, columns] of this item alone */
    ptrdiff_t columns;
};

static void note(const struct qkv_worker *w, struct marks *marks, ptrdiff_t column)
{
    for (ptrdiff_t r = 0; marks && r < w->rows; ++r) {
        ptrdiff_t at = r * marks->columns + column;
        float shrink = w->shrink[r];
        marks->sum[at] = w->sum[r] + marks->sum[at] * shrink;
        marks->square[at] = w->square[r] + marks->square[at] * shrink * shrink;
        marks->peak[at] = w->peak[r];
    }
}

/* To the plan's columns from `first` on, against the item's last peak. */
static void hand_in(const struct qkv_worker *w, const struct marks *marks, const struct plan *plan, ptrdiff_t head,
                    ptrdiff_t first)
{
    for (ptrdiff_t r = 0; marks && r < w->rows; ++r)
        for (ptrdiff_t i = 0; i < marks->columns; ++i) {
            ptrdiff_t from = r * marks->columns + i, to = (head * w->rows + r) * plan->columns + first + i;
            float sum = marks->sum[from], shrink = sum == 0.0f ? 0.0f : qkv_exp(marks->peak[from] - w->peak[r]);
            plan->mass[to] = sum * shrink;
            plan->focus[to] = marks->square[from] / (sum > 1e-30f ? sum : 1e-30f) * shrink;
        }
}

static struct marks *make_marks(struct marks *marks, const struct plan *plan, ptrdiff_t columns)
{
    if (!plan->call->mass) return NULL;
    marks->columns = columns;
    marks->sum = calloc((size_t)(3 * plan->rows * columns) + 1, sizeof(float));
    marks->square = marks->sum + plan->rows * columns;
    marks->peak = marks->square + plan->rows * columns;
    return marks;
}

/* ---- tiles ---- */

/* What is hidden, [queries, tile's tokens], scores minus infinity. */
static void hide(struct qkv_worker *w, ptrdiff_t tokens, const uint8_t *hidden)
{
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t i = 0; i < tokens; ++i)
            if (hidden[r % w->call->tokens * QKV_TILE + i]) w->scores[r * QKV_TILE + i] = -__builtin_inff();
}

static void take(struct qkv_worker *w, const struct plan *plan, const struct qkv_tile *tile, const uint8_t *hidden)
{
    plan->ops->scores(w, tile);
    if (w->call->softcap > 0) plan->ops->cap(w, tile->tokens);
    if (hidden) hide(w, tile->tokens, hidden);
    plan->ops->weigh(w, tile->tokens);
    plan->ops->values(w, tile);
}

/* The first position that query `i` sees in the blocks. */
static int64_t first_seen(const struct qkv_attention *call, ptrdiff_t i)
{
    int64_t low = call->reach ? call->positions[i] - call->reach + 1 : 0;
    return low > call->hidden ? low : call->hidden;
}

/* Where scales change, or the tile is full. */
static ptrdiff_t tile_end(const struct qkv_side *side, ptrdiff_t from, ptrdiff_t end)
{
    if (end > from + QKV_TILE) end = from + QKV_TILE;
    for (int part = 0; part < 2; ++part) {
        if (side[part].codec == QKV_EXACT || side[part].by_token) continue;
        ptrdiff_t limit = (from / side[part].group + 1) * side[part].group;
        if (end > limit) end = limit;
    }
    return end;
}

static void aim(struct qkv_tile *tile, const struct qkv_run *run, ptrdiff_t block, ptrdiff_t from)
{
    for (int part = 0; part < 2; ++part) {
        const struct qkv_side *side = tile->side + part;
        tile->stride[part] = side->row_bytes;
        tile->codes[part] = run->codes[part] + (block * run->tokens + from) * side->row_bytes;
        if (side->codec == QKV_EXACT) continue;
        ptrdiff_t each = side->by_token ? side->dim / side->group : side->dim;
        ptrdiff_t rows = side->by_token ? run->tokens : run->tokens / side->group;
        ptrdiff_t at = (block * rows + (side->by_token ? from : from / side->group)) * each;
        tile->scale[part] = run->scale[part] + at;
        tile->zero[part] = run->zero[part] ? run->zero[part] + at : NULL;
    }
}

/* Where a block of one head lies. */
struct place {
    const struct qkv_run *run;
    ptrdiff_t block; /* counts heads within blocks of the run */
};

/* Has the same tile of another block fetched meanwhile: its scales at once, its codes as this one's are read. */
static void look_ahead(struct qkv_tile *tile, const struct place *next, ptrdiff_t from)
{
    struct qkv_tile other = *tile;
    if (next->run) aim(&other, next->run, next->block, from);
    for (int part = 0; part < 2; ++part) {
        const struct qkv_side *side = tile->side + part;
        ptrdiff_t count = side->by_token ? tile->tokens * (side->dim / side->group) : side->dim;
        tile->ahead[part] = other.codes[part];
        for (ptrdiff_t i = 0; next->run && side->codec != QKV_EXACT && i < count; i += 32) {
            __builtin_prefetch(other.scale[part] + i);
            if (other.zero[part]) __builtin_prefetch(other.zero[part] + i);
        }
    }
}

/* One block of one head; `next` is the one after it, or nowhere. */
static void walk_block(struct qkv_worker *w, const struct plan *plan, const struct place *here, const struct place *next,
                       int64_t start, struct marks *marks, ptrdiff_t column)
{
    const struct qkv_run *run = here->run;
    const struct qkv_attention *call = plan->call;
    struct qkv_tile tile = {.side = {call->side[0], call->side[1]}};
    for (ptrdiff_t from = 0, end; from < run->tokens; from = end) {
        uint8_t hidden[QKV_QUERIES * QKV_TILE];
        end = tile_end(call->side, from, run->tokens);
        int any = 0, all = 1;
        for (ptrdiff_t i = 0; i < call->tokens; ++i) {
            int64_t low = first_seen(call, i) - start - from;
            any |= low > 0;
            all &= low >= end - from;
            for (ptrdiff_t t = 0; call->reach + call->hidden && t < end - from; ++t) hidden[i * QKV_TILE + t] = t < low;
        }
        if (all) continue;
        aim(&tile, run, here->block, from);
        tile.tokens = end - from;
        look_ahead(&tile, next, from);
        take(w, plan, &tile, any ? hidden : NULL);
        note(w, marks, column);
    }
}

static int64_t is_hidden(const struct qkv_attention *call, ptrdiff_t i, ptrdiff_t at)
{
    int64_t position = call->tail_start + at, open = at - (call->tail.tokens - call->num_open), seen = 1;
    if (open >= 0) {
        seen = call->open_mask ? call->open_mask[i * call->num_open + open]
                               : open <= i + call->num_open - call->tokens;
    }
    if (call->reach) seen = seen && (position > call->positions[i] - call->reach || position < call->sinks);
    return !seen;
}

/* Anchors or tail; a block of the mass is `step` tokens. */
static void walk_exact(struct qkv_worker *w, const struct plan *plan, const struct qkv_exact *exact, ptrdiff_t head,
                       ptrdiff_t step, int masked, struct marks *marks)
{
    const struct qkv_attention *call = plan->call;
    ptrdiff_t size = exact->dtype == QKV_F32 ? 4 : 2;
    uint8_t hidden[QKV_QUERIES * QKV_TILE];
    struct qkv_tile tile = {.side = {{.dim = call->side[0].dim}, {.dim = call->side[1].dim}}};
    for (int part = 0; part < 2; ++part) {
        tile.side[part].dtype = exact->dtype;
        tile.stride[part] = exact->token_stride[part] * size;
    }
    for (ptrdiff_t from = 0, end; from < exact->tokens; from = end) {
        end = from + QKV_TILE < exact->tokens ? from + QKV_TILE : exact->tokens;
        ptrdiff_t limit = (from / step + 1) * step;
        if (end > limit) end = limit;
        tile.tokens = end - from;
        for (int part = 0; part < 2; ++part)
            tile.codes[part] = (const uint8_t *)exact->data[part] + head * exact->head_stride[part] * size +
                               from * tile.stride[part];
        tile.ahead[0] = tile.codes[0], tile.ahead[1] = tile.codes[1];
        for (ptrdiff_t i = 0; masked && i < call->tokens; ++i)
            for (ptrdiff_t t = from; t < end; ++t) hidden[i * QKV_TILE + t - from] = (uint8_t)is_hidden(call, i, t);
        take(w, plan, &tile, masked ? hidden : NULL);
        if (marks) note(w, marks, from / step);
    }
}

/* ---- items ---- */

static void keep(const struct qkv_worker *w, const struct plan *plan, const struct qkv_side *values, ptrdiff_t item)
{
    plan->ops->finish(w, values, plan->output + item * w->rows * values->dim);
    memcpy(plan->peak + item * w->rows, w->peak, (size_t)w->rows * sizeof(float));
    memcpy(plan->total + item * w->rows, w->total, (size_t)w->rows * sizeof(float));
}

static void exact_item(struct qkv_worker *w, struct plan *plan, ptrdiff_t head)
{
    const struct qkv_attention *call = plan->call;
    struct qkv_side keys = {.dtype = call->anchors.dtype, .dim = call->side[QKV_KEYS].dim};
    struct qkv_side values = {.dtype = call->tail.dtype, .dim = call->side[QKV_VALUES].dim};
    struct marks space, *marks = make_marks(&space, plan, plan->columns - call->num_blocks);
    if (marks && !marks->sum) {
        plan->no_memory = 1;
        return;
    }
    begin(w);
    if (call->anchors.tokens) {
        load_queries(w, head, call->anchor_queries != NULL, 0);
        plan->ops->prepare(w, &keys);
        walk_exact(w, plan, &call->anchors, head, call->anchors.tokens, 0, NULL);
    }
    load_queries(w, head, 0, 0);
    keys.dtype = call->tail.dtype;
    plan->ops->prepare(w, &keys);
    walk_exact(w, plan, &call->tail, head, call->block_size, call->num_open > 1 || call->reach, marks);
    keep(w, plan, &values, head);
    hand_in(w, marks, plan, head, call->num_blocks);
    if (marks) free(marks->sum);
}

static void block_item(struct qkv_worker *w, struct plan *plan, ptrdiff_t item)
{
    const struct qkv_attention *call = plan->call;
    ptrdiff_t head = item % call->heads, first = (item / call->heads - 1) * plan->span;
    ptrdiff_t last = first + plan->span < call->num_blocks ? first + plan->span : call->num_blocks;
    struct marks space, *marks = make_marks(&space, plan, last - first);
    if (marks && !marks->sum) {
        plan->no_memory = 1;
        return;
    }
    begin(w);
    load_queries(w, head, 0, (int)call->side[QKV_KEYS].rotated);
    plan->ops->prepare(w, call->side);
    const struct qkv_run *run = call->runs;
    ptrdiff_t slot = first;
    for (; slot >= run->blocks; ++run) slot -= run->blocks;
    for (ptrdiff_t at = first; at < last; ++at) {
        struct place here = {run, slot * call->heads + head}, next = {NULL, 0};
        if (++slot == run->blocks) ++run, slot = 0;
        if (at + 1 < last) next = (struct place){run, slot * call->heads + head};
        walk_block(w, plan, &here, &next, call->starts[at], marks, at - first);
    }
    keep(w, plan, call->side + QKV_VALUES, item);
    hand_in(w, marks, plan, head, first);
    if (marks) free(marks->sum);
}

static void run_items(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct plan *plan = pointer;
    struct qkv_worker worker;
    void *memory = hire(&worker, plan);
    if (!memory) plan->no_memory = 1;
    for (ptrdiff_t item = begin; memory && item < end; ++item) {
        if (item < plan->call->heads) exact_item(&worker, plan, item);
        else block_item(&worker, plan, item);
    }
    free(memory);
}

/* ---- the merge ---- */

/* Adds what the items from `item` on, `step` apart, found for a row; their peaks become their factors. */
static float add_items(struct plan *plan, ptrdiff_t item, ptrdiff_t step, ptrdiff_t r, float peak, float *sum)
{
    ptrdiff_t dim = plan->call->side[QKV_VALUES].dim;
    float total = 0.0f;
    for (; item < plan->items; item += step) {
        ptrdiff_t at = item * plan->rows + r;
        float factor = qkv_exp(plan->peak[at] - peak);
        for (ptrdiff_t i = 0; i < dim; ++i) sum[i] += plan->output[at * dim + i] * factor;
        total += plan->total[at] * factor;
        plan->peak[at] = factor;
    }
    return total;
}

static void merge_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct plan *plan = pointer;
    const struct qkv_attention *call = plan->call;
    const struct qkv_side *values = call->side + QKV_VALUES;
    float *sum = malloc((size_t)values->dim * sizeof *sum);
    if (!sum) plan->no_memory = 1;
    for (ptrdiff_t row = begin; sum && row < end; ++row) {
        ptrdiff_t head = row / plan->rows, r = row % plan->rows, query = head * call->group + r / call->tokens;
        float peak = call->sink_logits ? call->sink_logits[query] : NOTHING;
        for (ptrdiff_t item = head; item < plan->items; item += call->heads) {
            float other = plan->peak[item * plan->rows + r];
            peak = other > peak ? other : peak;
        }
        memset(sum, 0, (size_t)values->dim * sizeof *sum);
        float total = add_items(plan, head + call->heads, call->heads, r, peak, sum);
        if (values->rotated && call->num_blocks) spread(sum, values->dim);
        total += add_items(plan, head, plan->items, r, peak, sum);
        if (call->sink_logits) total += qkv_exp(call->sink_logits[query] - peak);
        ptrdiff_t to = (r % call->tokens * call->heads * call->group + query) * values->dim;
        for (ptrdiff_t i = 0; i < values->dim; ++i) qkv_store(call->output, (int)call->dtype, to + i, sum[i] / total);
        for (ptrdiff_t item = head; item < plan->items; item += call->heads) plan->peak[item * plan->rows + r] /= total;
    }
    free(sum);
}

static void merge_columns(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct plan *plan = pointer;
    const struct qkv_attention *call = plan->call;
    for (ptrdiff_t column = begin; column < end; ++column) {
        ptrdiff_t range = column < call->num_blocks ? 1 + column / plan->span : 0;
        for (ptrdiff_t i = 0; i < call->tokens; ++i) {
            float mass = 0.0f, focus = 0.0f;
            for (ptrdiff_t row = i; row < call->heads * plan->rows; row += call->tokens) {
                ptrdiff_t head = row / plan->rows, item = range * call->heads + head;
                float factor = plan->peak[item * plan->rows + row % plan->rows];
                mass += plan->mass[row * plan->columns + column] * factor;
                focus += plan->focus[row * plan->columns + column] * factor;
            }
            call->mass[i * plan->columns + column] = mass;
            call->focus[i * plan->columns + column] = focus;
        }
    }
}

/* ---- exported ---- */

static const struct qkv_attention_ops *chosen(int64_t level)
{
#if QKV_X86
    if (level == QKV_AVX512) return &qkv_attention_avx512;
    if (level == QKV_AVX2) return &qkv_attention_avx2;
#endif
    (void)level;
    return &qkv_attention_portable;
}

/* Floats of room that a call needs. */
QKV_EXPORT int64_t qkv_attention_room(const struct qkv_attention *call)
{
    struct plan plan = cut(call);
    return place(&plan);
}

/* Returns 0, or 1 when there was no memory. */
QKV_EXPORT int qkv_attention(const struct qkv_attention *call)
{
    struct plan plan = cut(call);
    place(&plan);
    plan.ops = chosen(call->level);
    ptrdiff_t tokens = call->num_blocks * call->block_size + call->tail.tokens + call->anchors.tokens;
    ptrdiff_t work = tokens * call->heads * call->side[QKV_KEYS].dim;
    int threads = work < 65536 ? 1 : (int)call->threads;
    qkv_for(plan.items, 1, threads, run_items, &plan);
    if (plan.no_memory) return 1;
    qkv_for(call->heads * plan.rows, 16, threads, merge_rows, &plan);
    if (call->mass) qkv_for(plan.columns, 64, threads, merge_columns, &plan);
    return plan.no_memory;
}
