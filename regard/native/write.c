/* Texts that are written token by token: the next rows of each text through a stack of packed blocks, with
 * or without cross-attention to a memory, up to their logits; or the most likely tokens, step after step.
 * regard/layers/fast/stack.py calls this. Threads share every product, so that weights are read once. */
#include "block.h"

enum { STRETCH = 16 * PANEL };   /* columns of the vocabulary that stay in the cache */
enum { ROWS_AT_ONCE = 256 };     /* of texts that are read, if one text has no more */
enum { WORTH_A_THREAD = 1 << 19 }; /* multiplications */

/* keys and values of texts so far, (sentences, groups, room, d) of each block */
typedef struct {
  long room, rows, longest; /* rows: in all; longest: keys that a row may see */
  float *const *keys, *const *values;
  /* what cross-attention reads: its length, steps in memory of keys and values by sentence, group and key,
   * whether they are bfloat16 (d a multiple of LANES), and a mask by sentence and token: 0 hides a key */
  long memory, key_b, key_g, key_s, value_b, value_g, value_s, half;
  const char *const *memory_keys, *const *memory_values;
  const unsigned char *memory_mask;
  long memory_mask_b, memory_mask_t;
  float *queries, *asked; /* (blocks, rows, heads, d) are kept here, if somebody watches */
} Past;

/* a row: the text that it is of, its place there, how many keys it may see, which of them are hidden from it
 * (0), what is added to scores by head, and how it is rotated (cos, cos, -sin, sin) */
typedef struct {
  long sentence, slot, number, seen, bias_h, token;
  const unsigned char *mask, *memory_mask;
  const float *bias, *turn;
} Row;

static inline long padded(long keys) { return (keys + LANES) / LANES * LANES; }

/* Room for rows that several threads work on, of which each has its own for attention. Returns what is to
 * be freed, or nothing. */
static char *furnish(const Engine *e, Desk *desks, long threads, long rows, long keys) {
  const Shape *s = &e->shape;
  long hd = s->heads * s->head_width, most = s->width > hd ? s->width : hd;
  long wide = hd + 2 * s->kv_heads * s->head_width;
  wide = wide > s->ffn_width ? wide : s->ffn_width;
  long largest = wide > most ? wide : most, own = (2 * s->heads + 1) * padded(keys) + s->heads;
  long numbers = rows * (2 * most + wide + 1) + threads * own + 2 * LANES;
  long bytes = (numbers * 4 + 63) / 64 * 64 + threads * 2 * padded(keys) * (long)sizeof(float *);
  char *block = aligned_alloc(64, (bytes + rows * (largest + QUAD) + 63) / 64 * 64);
  if (!block) return 0;
  for (long i = 0; i < threads; i++) {
    Desk *k = desks + i;
    *k = (Desk){.engine = e, .number = i};
    k->y = (float *)block, k->wide = k->y + rows * most, k->x = k->wide + rows * wide;
    k->rounded.scale = k->x + rows * most, k->weights = k->rounded.scale + rows + i * own;
    k->keys = (const float **)(block + (numbers * 4 + 63) / 64 * 64) + i * 2 * padded(keys);
    k->values = k->keys + padded(keys);
    k->rounded.bytes = (unsigned char *)block + bytes;
  }
  return block;
}

/* as many threads as there is work for */
static long useful(const Engine *e, long rows, long threads) {
  const Shape *s = &e->shape;
  long each = s->width * (4 * s->heads * s->head_width + 3 * s->ffn_width);
  long work = rows * ((s->readers + s->writers) * each + s->width * s->target_vocab) / WORTH_A_THREAD;
  return work < threads ? (work > 1 ? work : 1) : threads;
}

/* ---- attention */

/* turn pairs (i, i + d/2) */
static void rotate(float *x, const float *by, long d) {
  for (long c = 0; c < d / 2; c++) {
    float a = x[c], b = x[c + d / 2];
    x[c] = a * by[c] + b * by[d + c];
    x[c + d / 2] = b * by[c + d / 2] + a * by[d + c + d / 2];
  }
}

/* rotate what was projected, and add it to the past */
static void remember(const Desk *k, const Past *p, const Row *rows, long count, long n) {
  const Shape *s = &k->engine->shape;
  long h = s->heads, g = s->kv_heads, d = s->head_width;
  for (long i = part_of(k, count, k->number); i < part_of(k, count, k->number + 1); i++) {
    float *own = k->wide + i * (h + 2 * g) * d;
    for (long head = 0; rows[i].turn && head < h + g; head++) rotate(own + head * d, rows[i].turn, d);
    for (long group = 0; group < g; group++) {
      long at = ((rows[i].sentence * g + group) * p->room + rows[i].slot) * d;
      memcpy(p->keys[n] + at, own + (h + group) * d, d * sizeof(float));
      memcpy(p->values[n] + at, own + (h + g + group) * d, d * sizeof(float));
    }
  }
  meet(k->team);
}

/* what a row sees of keys and values that are so many bytes apart; there is none that is hidden */
static Sight look(const Desk *k, const Row *row, long count, const char *keys, const char *values, long key_step,
                  long value_step, const unsigned char *mask, const float *bias, float *biases) {
  Sight at = {.keys = k->keys, .values = k->values, .span = row->bias_h ? padded(count) : 0};
  long heads = bias ? row->bias_h ? k->engine->shape.heads : 1 : 0;
  for (long j = 0; j < count; j++) {
    if (mask && !mask[j]) continue;
    for (long head = 0; head < heads; head++)
      biases[head * at.span + at.count] = bias[head * row->bias_h + j];
    k->keys[at.count] = (const float *)(keys + j * key_step);
    k->values[at.count++] = (const float *)(values + j * value_step);
  }
  if (at.count) fill_up(k->keys, at.count);
  if (heads) at.bias = biases;
  return at;
}

/* attention of rows, projected to wide, to their own past or to the memory; what they see goes to y */
static void attend_rows(Desk *k, const Past *p, const Row *rows, long count, long n, int cross) {
  const Shape *s = &k->engine->shape;
  long h = s->heads, g = s->kv_heads, d = s->head_width, q_step = cross ? h * d : (h + 2 * g) * d;
  float *biases = k->weights + h * padded(p->longest) + h, *kept = cross ? p->asked : p->queries;
  long begin = part_of(k, count * g, k->number), end = part_of(k, count * g, k->number + 1), size = p->half ? 2 : 4;
  Sight at = {0};
  for (long item = begin; item < end; item++) {
    const Row *row = rows + item / g;
    long group = item % g, b = row->sentence, from = b * g * p->room * d;
    const float *q = k->wide + item / g * q_step;
    if (item == begin || !group) {
      if (cross)
        at = look(k, row, p->memory, p->memory_keys[n] + b * p->key_b * size, p->memory_values[n] + b * p->value_b * size,
                  p->key_s * size, p->value_s * size, row->memory_mask, 0, biases);
      else
        at = look(k, row, row->seen, (const char *)(p->keys[n] + from), (const char *)(p->values[n] + from), d * 4, d * 4,
                  row->mask, row->bias, biases);
      at.half = cross && p->half;
      at.keys_apart = cross ? p->key_g : p->room * d, at.values_apart = cross ? p->value_g : p->room * d;
    }
    attend(s, group * (h / g), (group + 1) * (h / g), q, k->y + item / g * h * d, &at, k->weights);
    if (kept && group == g - 1) memcpy(kept + (n * p->rows + row->number) * h * d, q, h * d * sizeof(float));
  }
  meet(k->team);
}

/* ---- rows x through all blocks and the last norm, to y */

static void pass(Desk *k, const Past *p, const Row *rows, long count) {
  const Engine *e = k->engine;
  for (long n = 0; n < e->shape.readers + e->shape.writers; n++) {
    const Block *b = e->blocks + n;
    project(k, count, enter(k, b->norm_1, b->shift_1, count), &b->qkv, k->wide, STORE);
    remember(k, p, rows, count, n);
    attend_rows(k, p, rows, count, n, 0);
    add(k, k->y, &b->out, b->norm_1, b->shift_1, count);
    if (n >= e->shape.readers) {
      project(k, count, enter(k, b->norm_3, b->shift_3, count), &b->ask, k->wide, STORE);
      attend_rows(k, p, rows, count, n, 1);
      add(k, k->y, &b->tell, b->norm_3, b->shift_3, count);
    }
    feed_forward(k, b, count);
  }
  finish_stack(k, e->writer_norm, e->writer_shift, count);
  if (e->shape.head_scale == 1) return;
  long w = e->shape.width;
  for (long c = part_of(k, count, k->number) * w; c < part_of(k, count, k->number + 1) * w; c++)
    k->y[c] *= (float)e->shape.head_scale;
  meet(k->team);
}

/* ---- one step of (b, t) tokens; the search is elsewhere */

typedef struct {
  Past past;
  long sentences, tokens, before, causal, threads; /* before: keys that are there; causal: no row sees a later one */
  const float *turn, *bias; /* of each row, with their steps in memory; may be missing */
  const unsigned char *mask;
  long turn_b, turn_t, mask_b, mask_t, bias_b, bias_h, bias_t;
  float *x, *logits; /* (b, t, w), read and overwritten; (b, t, vocabulary), unless there is no head */
} Step;

typedef struct {
  const Step *now;
  Desk *desks;
  const Row *rows;
  long at_once;
} Stepping;

static void step_part(const void *given, long number, Team *team) {
  const Stepping *all = given;
  const Step *now = all->now;
  Desk *k = all->desks + number;
  const Engine *e = k->engine;
  long w = e->shape.width, rows = now->sentences * now->tokens;
  k->team = team;
  for (long first = 0; first < rows; first += all->at_once) {
    long count = rows - first < all->at_once ? rows - first : all->at_once;
    k->x = now->x + first * w;
    pass(k, &now->past, all->rows + first, count);
    if (now->logits) project(k, count, k->y, &e->head, now->logits + first * e->head.out, STORE);
    long begin = part_of(k, count, number) * w, end = part_of(k, count, number + 1) * w;
    memcpy(k->x + begin, k->y + begin, (end - begin) * sizeof(float));
    meet(team);
  }
}

/* Returns 1, or 0 where memory was missing. */
long regard_step(const Engine *e, const Step *now) {
  long t = now->tokens, rows = now->sentences * t;
  long texts = ROWS_AT_ONCE / t > 1 ? ROWS_AT_ONCE / t : 1; /* each is read as a whole */
  Stepping all = {.now = now, .at_once = texts < now->sentences ? texts * t : rows};
  long threads = useful(e, all.at_once, now->threads);
  Row *places = malloc(rows * sizeof(Row));
  all.desks = malloc(threads * sizeof(Desk)), all.rows = places;
  char *scratch = all.desks && places ? furnish(e, all.desks, threads, all.at_once, now->past.longest) : 0;
  for (long i = 0; scratch && i < rows; i++) {
    long b = i / t, j = i % t, seen = now->before + (now->causal ? j + 1 : t);
    Row *row = places + i;
    *row = (Row){.sentence = b, .slot = now->before + j, .number = i, .seen = seen, .bias_h = now->bias_h};
    if (now->turn) row->turn = now->turn + b * now->turn_b + j * now->turn_t;
    if (now->mask) row->mask = now->mask + b * now->mask_b + j * now->mask_t;
    if (now->bias) row->bias = now->bias + b * now->bias_b + j * now->bias_t;
    const Past *p = &now->past;
    if (p->memory_mask) row->memory_mask = p->memory_mask + b * p->memory_mask_b + j * p->memory_mask_t;
  }
  if (scratch) together(step_part, &all, threads);
  free(scratch);
  free(all.desks);
  free(places);
  return scratch != 0;
}

/* ---- the most likely tokens after each text, step after step */

typedef struct {
  Past past;
  long sentences, steps, longest, ends, threads; /* steps: to make now; longest: text that is written */
  const int *ids, *end;            /* texts one after the other; tokens that end a text */
  const long *first, *limit;       /* where each begins (and the last ends); most tokens after each */
  const float *never, *at, *turn;  /* added to logits; added to embeddings, and rotations, by place, or missing */
  const float *table, *norm, *shift; /* of tokens; norm of embeddings, or none */
  long table_row, table_column;
  double scale;                    /* of embeddings */
  long *read, *counts, *done;      /* tokens of each text that were read, and written; whether it has ended */
  int *written;                    /* (sentences, longest) */
  float *likely;                   /* the log-probability of each of them */
} Writing;

/* of a stretch of the vocabulary */
typedef struct {
  float top, sum;
  long token;
} Best;

typedef struct {
  const Writing *job;
  const Matrix *head;
  Desk *desks;
  Row *rows;
  float *logits; /* of each thread */
  Best *best;    /* (rows, stretches) */
  long *ready;   /* rows after which a token is written */
  long count, writes, left, most, stretches, broken;
} Pages;

/* the rows that are read next: all tokens that are known of each text, as far as there is room */
static void gather(Pages *all) {
  const Writing *job = all->job;
  all->count = all->writes = 0;
  if (all->broken || !all->left--) return;
  for (long b = 0; b < job->sentences && all->count < all->most; b++) {
    long given = job->first[b + 1] - job->first[b], known = given + job->counts[b];
    for (; !job->done[b] && job->read[b] < known && all->count < all->most; job->read[b]++) {
      long slot = job->read[b], token = slot < given ? job->ids[job->first[b] + slot] : job->written[b * job->longest + slot - given];
      if (slot + 1 == known) all->ready[all->writes++] = all->count;
      all->rows[all->count++] = (Row){.sentence = b, .slot = slot, .seen = slot + 1, .token = token,
                                      .turn = job->turn ? job->turn + slot * 2 * all->desks->engine->shape.head_width : 0};
    }
  }
}

/* the largest logit of each row in the stretches of this thread, and the sum of exponentials */
static void read_vocabulary(Desk *k, const Pages *all) {
  const Matrix *head = all->head;
  long rows = all->writes, stretches = all->stretches;
  float *logits = all->logits + k->number * all->most * (STRETCH + 1), *top = logits + rows * STRETCH;
  for (long i = 0; i < rows; i++) top[i] = -INFINITY;
  round_for(k, rows, k->y, head);
  for (long n = part_of(k, stretches, k->number); n < part_of(k, stretches, k->number + 1); n++) {
    long from = n * (STRETCH / PANEL), to = from + STRETCH / PANEL;
    to = to < head->panels ? to : head->panels;
    multiply(rows, k->y, &k->rounded, head, from, to, logits, STRETCH, STRETCH, STORE, 0);
    for (long i = 0; i < rows; i++) {
      float *own = logits + i * STRETCH;
      vec large = {0}, sums = {0};
      large += -INFINITY;
      for (long c = 0; c < (to - from) * PANEL; c += LANES) {
        vec some = load(own + c) + load(all->job->never + n * STRETCH + c);
        store(own + c, some);
        large = larger(some, large);
      }
      Best *best = all->best + i * stretches + n;
      *best = (Best){largest(large), 0, 0};
      if (best->top == -INFINITY) continue;
      for (long c = 0; c < (to - from) * PANEL; c += LANES) sums += exp_lanes(load(own + c) - best->top);
      best->sum = total(sums);
      if (best->top <= top[i]) continue; /* then it is not asked for */
      top[i] = best->top;
      while (own[best->token] != best->top) best->token++;
      best->token += n * STRETCH;
    }
  }
  meet(k->team);
}

/* write the most likely token of each row that is this thread's */
static void choose(const Desk *k, Pages *all) {
  const Writing *job = all->job;
  for (long i = part_of(k, all->writes, k->number); i < part_of(k, all->writes, k->number + 1); i++) {
    const Best *some = all->best + i * all->stretches;
    long most = 0, b = all->rows[all->ready[i]].sentence;
    float sum = 0;
    for (long n = 1; n < all->stretches; n++)
      if (some[n].top > some[most].top) most = n;
    for (long n = 0; n < all->stretches; n++)
      if (some[n].top != -INFINITY) sum += some[n].sum * expf(some[n].top - some[most].top);
    long place = b * job->longest + job->counts[b]++;
    job->written[place] = (int)some[most].token;
    job->likely[place] = -logf(sum);
    if (!(job->likely[place] - job->likely[place] == 0) || !(some[most].top - some[most].top == 0))
      __atomic_store_n(&all->broken, 1, __ATOMIC_RELAXED);
    job->done[b] = job->counts[b] == job->limit[b];
    for (long n = 0; n < job->ends; n++) job->done[b] |= job->end[n] == some[most].token;
  }
  meet(k->team);
}

static void write_part(const void *given, long number, Team *team) {
  Pages *all = *(Pages *const *)given;
  const Writing *job = all->job;
  Desk *k = all->desks + number;
  long w = k->engine->shape.width;
  k->team = team;
  for (;;) {
    if (!number) gather(all);
    meet(team);
    if (!all->count) return;
    for (long i = part_of(k, all->count, number); i < part_of(k, all->count, number + 1); i++)
      embed(job->table, job->table_row, job->table_column, job->at, job->scale, all->rows[i].token, all->rows[i].slot, w,
            k->x + i * w);
    meet(team);
    if (job->norm) normalise_rows(k, k->x, job->norm, job->shift, k->x, all->count);
    pass(k, &job->past, all->rows, all->count);
    for (long i = 0; !number && i < all->writes; i++) memmove(k->y + i * w, k->y + all->ready[i] * w, w * sizeof(float));
    meet(team);
    if (!all->writes) continue;
    read_vocabulary(k, all);
    choose(k, all);
  }
}

/* Returns 1, or 0 where a number was not finite or memory was missing: then nothing can be used. */
long regard_write(const Engine *e, const Engine *head, const Writing *job) {
  Pages all = {.job = job, .head = &head->head, .left = job->steps};
  Pages *given = &all;
  all.most = ROWS_AT_ONCE > job->sentences ? ROWS_AT_ONCE : job->sentences;
  all.stretches = (head->head.panels * PANEL + STRETCH - 1) / STRETCH;
  long threads = useful(e, job->sentences, job->threads), wider = useful(head, job->sentences, job->threads);
  threads = threads > wider ? threads : wider;
  all.desks = malloc(threads * sizeof(Desk));
  all.rows = malloc(all.most * sizeof(Row)), all.ready = malloc(all.most * sizeof(long));
  all.logits = malloc(threads * all.most * (STRETCH + 1) * sizeof(float));
  all.best = malloc(all.most * all.stretches * sizeof(Best));
  char *scratch = all.desks ? furnish(e, all.desks, threads, all.most, job->past.longest) : 0;
  long fine = scratch && all.rows && all.ready && all.logits && all.best;
  if (fine) together(write_part, &given, threads);
  free(scratch);
  free(all.desks);
  free(all.rows);
  free(all.ready);
  free(all.logits);
  free(all.best);
  return fine && !all.broken;
}
