/* Blocks of transformers whose matrices are packed: what translating and writing have in common. Several
 * threads may work on the same rows; each row is summed in one order, whatever stands beside it and
 * however many they are. */
#ifndef REGARD_BLOCK
#define REGARD_BLOCK
#include "product.h"
#include "threads.h"

typedef struct {
  long width, heads, kv_heads, head_width, ffn_width, act, gated, centred, post; /* post: norms come after */
  long readers, writers; /* blocks without and with cross-attention */
  long target_vocab, bytes; /* bytes: products are in int8; a vocabulary of 0: there is no head */
  double eps, scale, source_scale, target_scale, head_scale;
} Shape;

/* norm and projections of a block; keys and values of a memory are a matrix of their own */
typedef struct {
  const float *norm_1, *shift_1, *norm_2, *shift_2, *norm_3, *shift_3;
  Matrix qkv, out, gate, inner, outer, ask, memory, tell;
} Block;

typedef struct {
  Shape shape;
  Block *blocks; /* those without cross-attention, then those with it */
  const float *reader_norm, *reader_shift, *writer_norm, *writer_shift; /* may be missing */
  const float *source_norm, *source_shift, *target_norm, *target_shift; /* of embeddings, likewise */
  const float *source, *target; /* tables of tokens, likewise */
  long source_row, source_column, target_row, target_column;
  Matrix head;
} Engine;

/* what a thread works with: rows of vectors x, which are read as y and projected to wide */
typedef struct {
  const Engine *engine;
  Team *team;
  long number; /* of this thread in the team */
  float *x, *y, *wide, *weights; /* weights of attention are its own */
  const float **keys, **values;  /* so are these */
  Rounded rounded;
} Desk;

/* ---- attention */

/* sixteen numbers, which may be bfloat16, with zeros after `room` of them */
INLINE vec read_some(const float *from, long at, long room, const int half) {
  return half ? load_half((const unsigned short *)from + at) : load_some(from + at, room);
}

/* scores of LANES keys */
INLINE vec score(const float *q, const float *const *keys, long at, long d, const int half) {
  vec sums[LANES] = {{0}};
  for (long c = 0; c < d; c += LANES) {
    vec part = load_some(q + c, d - c);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) sums[j] += part * read_some(keys[j], at + c, d - c, half);
  }
  return totals(sums);
}

/* y = n vectors of the weighted sum of values, times a share; the last of them may be a part of one */
INLINE void mix(const int n, const float *weights, long count, const float *const *values, long at, long room,
                float share, float *y, const int half) {
  vec sums[4] = {{0}};
  for (long j = 0; j < count; j++)
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
      sums[i] += weights[j] * read_some(values[j], at + i * LANES, room - i * LANES, half);
#pragma GCC unroll 4
  for (int i = 0; i < n; i++) store_some(y + i * LANES, sums[i] * share, room - i * LANES);
}

/* Where what a query sees lies: `count` keys and values, of which groups of heads are so far apart. After
 * the last key its address is repeated up to a multiple of LANES. A bias may be added to scores, of
 * which heads are `span` apart. */
typedef struct {
  const float *const *keys, *const *values;
  long count, keys_apart, values_apart;
  const float *bias;
  long span, half; /* half: keys and values are bfloat16, heads a multiple of LANES wide */
} Sight;

/* What a query sees by heads `first` to `last`; weights has as much room as keys, and one number more, for
 * each head. */
INLINE void attend_by(const Shape *s, long first, long last, const float *q, float *y, const Sight *at, float *weights,
                      const int half) {
  long d = s->head_width, count = at->count, padded = (count + LANES - 1) / LANES * LANES;
  long each = s->heads / s->kv_heads;
  float *shares = weights + s->heads * padded;
  for (long head = first; head < last; head++) {
    float *w = weights + head * padded;
    vec most = all(-INFINITY), sums = {0};
    for (long j = 0; j < padded; j += LANES) {
      const float *own = q + head * d, *const *some = at->keys + j;
      long from = head / each * at->keys_apart;
      vec made = d == 32   ? score(own, some, from, 32, half)
                 : d == 48 ? score(own, some, from, 48, half)
                 : d == 64 ? score(own, some, from, 64, half)
                           : score(own, some, from, d, half);
      made *= (float)s->scale;
      if (at->bias) made += load_some(at->bias + head * at->span + j, count - j);
      made = pick_first(count - j, made, all(-INFINITY));
      store(w + j, made);
      most = larger(most, made);
    }
    float top = largest(most);
    for (long j = 0; j < padded; j += LANES) {
      vec part = exp_lanes(load(w + j) - top);
      store(w + j, part);
      sums += part;
    }
    shares[head] = 1.0f / total(sums);
  }
  for (long head = first; head < last; head++)
    for (long c = 0; c < d; c += 4 * LANES) {
      const float *w = weights + head * padded, *const *v = at->values;
      long room = d - c, from = head / each * at->values_apart + c;
      float *to = y + head * d + c, share = shares[head];
      if (room >= 4 * LANES) mix(4, w, count, v, from, 4 * LANES, share, to, half);
      else if (room == 2 * LANES) mix(2, w, count, v, from, 2 * LANES, share, to, half);
      else if (room == 3 * LANES) mix(3, w, count, v, from, 3 * LANES, share, to, half);
      else if (room <= LANES) mix(1, w, count, v, from, room, share, to, half);
      else if (room <= 2 * LANES) mix(2, w, count, v, from, room, share, to, half);
      else if (room <= 3 * LANES) mix(3, w, count, v, from, room, share, to, half);
      else mix(4, w, count, v, from, room, share, to, half);
    }
}

static inline void attend(const Shape *s, long first, long last, const float *q, float *y, const Sight *at, float *weights) {
  if (at->half) attend_by(s, first, last, q, y, at, weights, 1);
  else attend_by(s, first, last, q, y, at, weights, 0);
}

/* repeat the last address up to a multiple of LANES */
static inline void fill_up(const float **places, long count) {
  for (long j = count; j % LANES; j++) places[j] = places[count - 1];
}

/* ---- one block after the other; each thread of a team makes its own part of what is asked for */

/* where the part of a thread begins */
static inline long part_of(const Desk *k, long count, long number) { return count * number / k->team->count; }

/* norms of rows, which may be written where they were; sums are in one order on every processor */
INLINE void normalise_by(const int even, const Shape *s, const float *x, const float *weight, const float *shift,
                           float *y, long rows) {
  long w = s->width;
#define PART(at) (even ? load((at) + c) : load_some((at) + c, w - c))
  for (long i = 0; i < rows; i++, x += w, y += w) {
    vec sums = {0}, squares = {0};
    if (s->centred)
      for (long c = 0; c < w; c += LANES) sums += PART(x);
    float mean = total(sums) / (float)w;
    for (long c = 0; c < w; c += LANES) {
      vec apart = PART(x) - mean;
      if (!even) apart = pick_first(w - c, apart, (vec){0});
      squares += apart * apart;
    }
    float square = total(squares); /* what is too large to be squared must not become nothing */
    float by = square < INFINITY ? 1.0f / sqrtf(square / (float)w + (float)s->eps) : NAN;
    for (long c = 0; c < w; c += LANES) {
      vec made = (PART(x) - mean) * by * PART(weight);
      if (shift) made += PART(shift);
      store_some(y + c, made, even ? LANES : w - c);
    }
  }
#undef PART
}

static inline void normalise(const Shape *s, const float *x, const float *weight, const float *shift, float *y, long rows) {
  if (s->width % LANES) normalise_by(0, s, x, weight, shift, y, rows);
  else normalise_by(1, s, x, weight, shift, y, rows);
}

/* the same, each thread some rows, which all of them have when this returns */
static inline void normalise_rows(const Desk *k, const float *x, const float *weight, const float *shift, float *y, long rows) {
  long w = k->engine->shape.width, from = part_of(k, rows, k->number), to = part_of(k, rows, k->number + 1);
  normalise(&k->engine->shape, x + from * w, weight, shift, y + from * w, to - from);
  meet(k->team);
}

/* the columns of a product that are this thread's; the others' may come later */
static inline void project_part(Desk *k, long rows, const float *x, const Matrix *w, float *y, int how) {
  long from = part_of(k, w->panels, k->number), to = part_of(k, w->panels, k->number + 1);
  multiply(rows, x, &k->rounded, w, from, to, y + from * PANEL, w->out, w->out - from * PANEL, how,
           k->engine->shape.act);
}

/* the rows that products in bytes read, which all threads have when this returns */
static inline void round_for(Desk *k, long rows, const float *x, const Matrix *w) {
  if (!w->bytes) return;
  long from = part_of(k, rows, k->number), to = part_of(k, rows, k->number + 1);
  Rounded own = {k->rounded.bytes + from * quads(w->in) * QUAD, k->rounded.scale + from};
  round_rows(to - from, x + from * w->in, w->in, &own);
  meet(k->team);
}

/* rows times a matrix, which all threads have when this returns */
static inline void project(Desk *k, long rows, const float *x, const Matrix *w, float *y, int how) {
  round_for(k, rows, x, w);
  project_part(k, rows, x, w, y, how);
  meet(k->team);
}

/* what a sublayer reads, which is the norm of x unless norms come after */
static inline const float *enter(const Desk *k, const float *weight, const float *shift, long rows) {
  if (k->engine->shape.post) return k->x;
  normalise_rows(k, k->x, weight, shift, k->y, rows);
  return k->y;
}

/* add what a sublayer made, y times a matrix, to x */
static inline void add(Desk *k, const float *y, const Matrix *by, const float *weight, const float *shift, long rows) {
  project(k, rows, y, by, k->x, ADD);
  if (k->engine->shape.post) normalise_rows(k, k->x, weight, shift, k->x, rows);
}

/* the last norm of a stack, if it has one, from x to y */
static inline void finish_stack(const Desk *k, const float *weight, const float *shift, long rows) {
  if (weight) normalise_rows(k, k->x, weight, shift, k->y, rows);
  else {
    if (!k->number) memcpy(k->y, k->x, rows * k->engine->shape.width * sizeof(float));
    meet(k->team);
  }
}

/* a token's row of a table, scaled, and what its place adds, if it adds anything */
static inline void embed(const float *table, long row, long column, const float *at, double scale, long token, long place,
                         long width, float *x) {
  table += token * row;
  if (column == 1)
    for (long c = 0; c < width; c++) x[c] = table[c] * (float)scale;
  else
    for (long c = 0; c < width; c++) x[c] = table[c * column] * (float)scale;
  if (at)
    for (long c = 0; c < width; c++) x[c] += at[place * width + c];
}

static inline void feed_forward(Desk *k, const Block *b, long rows) {
  const float *in = enter(k, b->norm_2, b->shift_2, rows);
  round_for(k, rows, in, &b->inner);
  if (k->engine->shape.gated) { /* both have the same columns, so that each thread has what it multiplies */
    project_part(k, rows, in, &b->gate, k->wide, ACTIVATE);
    project_part(k, rows, in, &b->inner, k->wide, TIMES);
  } else
    project_part(k, rows, in, &b->inner, k->wide, ACTIVATE);
  meet(k->team);
  add(k, k->wide, &b->outer, b->norm_2, b->shift_2, rows);
}
#endif
