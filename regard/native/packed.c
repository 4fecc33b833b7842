/* Weights packed for products, and whether the numbers that they were packed from are still the same. */
#include <stdint.h>

#include "block.h"

void regard_engine_free(Engine *e) {
  if (!e) return;
  for (long i = 0; e->blocks && i < e->shape.readers + e->shape.writers; i++) {
    Block *b = e->blocks + i;
    Matrix *all[] = {&b->qkv, &b->out, &b->gate, &b->inner, &b->outer, &b->ask, &b->memory, &b->tell};
    for (long j = 0; j < 8; j++) release(all[j]);
  }
  free(e->blocks);
  release(&e->head);
  free(e);
}

static int lay(const Engine *e, Matrix *m, const Numbers *w, const float *bias, long first, long out, float never) {
  return pack(m, w, bias, first, out, never) && (!e->shape.bytes || pack_bytes(m));
}

/* Numbers come in the order of regard/layers/fast/engine.py: for each block norm, qkv, out, norm, gate, inner,
 * outer, and with cross-attention norm, its qkv and out, each with its bias; both last norms; those of
 * embeddings; tables; the head */
Engine *regard_engine_new(const Shape *shape, const Numbers *from) {
  Engine *e = calloc(1, sizeof(Engine));
  if (!e) return 0;
  e->shape = *shape;
  long w = shape->width, f = shape->ffn_width, fine = 1;
  long hd = shape->heads * shape->head_width, gd = shape->kv_heads * shape->head_width;
  e->blocks = calloc(shape->readers + shape->writers + 1, sizeof(Block));
  if (!e->blocks) return regard_engine_free(e), (Engine *)0;
  for (long i = 0; fine && i < shape->readers + shape->writers; i++) {
    Block *b = e->blocks + i;
    b->norm_1 = from[0].at, b->shift_1 = from[1].at, b->norm_2 = from[6].at, b->shift_2 = from[7].at;
    fine = lay(e, &b->qkv, from + 2, from[3].at, 0, hd + 2 * gd, 0) && lay(e, &b->out, from + 4, from[5].at, 0, w, 0);
    if (shape->gated) fine = fine && lay(e, &b->gate, from + 8, from[9].at, 0, f, 0);
    fine = fine && lay(e, &b->inner, from + 10, from[11].at, 0, f, 0);
    fine = fine && lay(e, &b->outer, from + 12, from[13].at, 0, w, 0);
    from += 14;
    if (i < shape->readers) continue;
    b->norm_3 = from[0].at, b->shift_3 = from[1].at;
    fine = fine && lay(e, &b->ask, from + 2, from[3].at, 0, hd, 0);
    fine = fine && lay(e, &b->memory, from + 2, from[3].at, hd, 2 * gd, 0);
    fine = fine && lay(e, &b->tell, from + 4, from[5].at, 0, w, 0);
    from += 6;
  }
  e->reader_norm = from[0].at, e->reader_shift = from[1].at;
  e->writer_norm = from[2].at, e->writer_shift = from[3].at;
  from += 4;
  e->source_norm = from[0].at, e->source_shift = from[1].at;
  e->target_norm = from[2].at, e->target_shift = from[3].at;
  e->source = from[4].at, e->source_row = from[4].row_step, e->source_column = from[4].column_step;
  e->target = from[5].at, e->target_row = from[5].row_step, e->target_column = from[5].column_step;
  if (shape->target_vocab) fine = fine && lay(e, &e->head, from + 6, from[7].at, 0, shape->target_vocab, -INFINITY);
  if (!fine) return regard_engine_free(e), (Engine *)0;
  return e;
}

/* Two sums of all numbers, one of them of the running sums: a change of any of them, or of two places,
 * changes these. Four parts are read at once, which is faster where memory is far. */
void regard_checksum(const Numbers *from, long count, uint64_t *sums) {
  enum { PARTS = 4, SIZE = 64 };
  typedef uint64_t words __attribute__((vector_size(SIZE)));
  words a[PARTS] = {{0}}, b[PARTS] = {{0}};
  uint64_t one = 0, two = 0;
  for (long i = 0; i < count; i++) {
    const char *at = (const char *)from[i].at;
    long size = at ? from[i].rows * from[i].columns * (long)sizeof(float) : 0, each = size / PARTS / SIZE * SIZE;
    for (long n = 0; n < each; n += SIZE)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) {
        words w;
        memcpy(&w, at + part * each + n, SIZE);
        b[part] += a[part] += w;
      }
    for (long n = PARTS * each; n < size; n += 4) {
      uint32_t w;
      memcpy(&w, at + n, 4);
      two += one += w;
    }
  }
  for (int part = 0; part < PARTS; part++)
    for (int i = 0; i < 8; i++) two += (one += a[part][i]) + b[part][i] * (uint64_t)(2 * (8 * part + i) + 1);
  sums[0] = one;
  sums[1] = two;
}

/* 1 if this processor computes here what it should, in floats and in bytes */
long regard_try(void) {
  enum { ROWS = 13, IN = 40, OUT = 50 };
  float x[ROWS * IN], w[OUT * IN], y[ROWS * OUT], scale[ROWS];
  unsigned char bytes[ROWS * IN];
  Rounded rounded = {bytes, scale};
  Numbers from = {w, OUT, IN, IN, 1};
  long fine = 1;
  for (long i = 0; i < ROWS * IN; i++) x[i] = (float)(i * 7 % 11) - 5.0f;
  for (long i = 0; i < OUT * IN; i++) w[i] = (float)(i * 5 % 13) - 6.0f;
  for (int kind = 0; fine && kind < 2; kind++) {
    Matrix m = {0};
    fine = pack(&m, &from, 0, 0, OUT, 0) && (!kind || pack_bytes(&m));
    if (fine) product(ROWS, x, &rounded, &m, y, STORE, 0);
    for (long i = 0; fine && i < ROWS * OUT; i++) {
      float sum = 0;
      for (long k = 0; k < IN; k++) sum += x[i / OUT * IN + k] * w[i % OUT * IN + k];
      fine = fabsf(sum - y[i]) <= (kind ? 10.0f : 0.0f);
    }
    release(&m);
  }
  return fine && fabsf(exp_lanes(all(1.0f))[3] - 2.7182818f) < 1e-5f;
}
