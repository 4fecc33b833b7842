/* Rows times a matrix that was packed once: panels of SIDE vectors of columns, and TALL rows of sums
 * in registers. A row is summed in one order, whatever stands beside it, so that its result has the
 * same bits in every batch. */
#ifndef REGARD_PRODUCT
#define REGARD_PRODUCT
#include <stdlib.h>
#include <string.h>

#include "act.h"

#ifdef __AVX512F__
enum { TALL = 12, SIDE = 2 };
#else /* half as many registers, of half the size: one vector is two of them */
enum { TALL = 6, SIDE = 1 };
#endif
enum { PANEL = SIDE * LANES };

/* what becomes of a product: it is stored, added to what is there, activated, or multiplies it */
enum { STORE, ADD, ACTIVATE, TIMES };

typedef struct {
  const float *at; /* may be missing */
  long rows, columns, row_step, column_step;
} Numbers;

typedef struct {
  long in, out, panels;
  float *packed, *bias; /* (panels, in, PANEL) and (panels, PANEL) */
} Matrix;

/* pack rows `first` to `first + out` of weights (out, in) with their bias; `never` fills up the bias */
static inline int pack(Matrix *m, const Numbers *w, const float *bias, long first, long out, float never) {
  m->in = w->columns;
  m->out = out;
  m->panels = (out + PANEL - 1) / PANEL;
  m->packed = aligned_alloc(64, (m->panels * m->in * PANEL + PANEL) * sizeof(float));
  m->bias = aligned_alloc(64, (m->panels + 1) * PANEL * sizeof(float));
  if (!m->packed || !m->bias) return 0;
  for (long p = 0; p < m->panels; p++)
    for (long c = 0; c < PANEL; c++) {
      long row = p * PANEL + c;
      m->bias[row] = row >= out ? never : bias ? bias[first + row] : 0.0f;
      for (long k = 0; k < m->in; k++)
        m->packed[(p * m->in + k) * PANEL + c] =
            row < out ? w->at[(first + row) * w->row_step + k * w->column_step] : 0.0f;
    }
  return 1;
}

INLINE void finish(int how, long act, float *y, vec sum) {
  switch (how) {
  case ADD: sum += load(y); break;
  case TIMES: sum *= load(y); break;
  case ACTIVATE: sum = activate(act, sum, 0); break;
  }
  store(y, sum);
}

/* m rows times a panel; `room` is how many columns of y there are from here on */
INLINE void tile(const int m, const float *x, long x_step, const float *w, const float *bias, long in,
                 float *y, long y_step, long room, int how, long act) {
  vec sums[TALL][SIDE];
#pragma GCC unroll 12
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) sums[i][j] = load(bias + j * LANES);
  for (long k = 0; k < in; k++, w += PANEL) {
    vec part[SIDE];
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) part[j] = load(w + j * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      float one = x[i * x_step + k];
#pragma GCC unroll 2
      for (int j = 0; j < SIDE; j++) sums[i][j] += one * part[j];
    }
  }
  if (room >= PANEL) {
#pragma GCC unroll 12
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
      for (int j = 0; j < SIDE; j++) finish(how, act, y + i * y_step + j * LANES, sums[i][j]);
    return;
  }
  for (int i = 0; i < m; i++) {
    float part[PANEL] __attribute__((aligned(64))) = {0};
    memcpy(part, y + i * y_step, room * sizeof(float));
    for (int j = 0; j < SIDE; j++) finish(how, act, part + j * LANES, sums[i][j]);
    memcpy(y + i * y_step, part, room * sizeof(float));
  }
}

/* m rows x (m, in) times panels `from` to `to` into y (m, columns of these panels) */
static void multiply(long m, const float *x, long x_step, const Matrix *w, long from, long to, float *y,
                     long y_step, int how, long act) {
  long blocks = (m + TALL - 1) / TALL;
  for (long p = from; p < to; p++) {
    const float *panel = w->packed + p * w->in * PANEL, *bias = w->bias + p * PANEL;
    long room = y_step - (p - from) * PANEL, row = 0;
    for (long b = 0; b < blocks; b++) { /* of about as many rows */
      int some = (int)(m / blocks + (b < m % blocks));
      const float *in = x + row * x_step;
      float *out = y + row * y_step + (p - from) * PANEL;
      row += some;
#define ROWS(n) \
  case n: tile(n, in, x_step, panel, bias, w->in, out, y_step, room, how, act); break;
      switch (some) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#ifdef __AVX512F__
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
      }
#undef ROWS
    }
  }
}

static void product(long m, const float *x, const Matrix *w, float *y, int how, long act) {
  multiply(m, x, w->in, w, 0, w->panels, y, w->out, how, act);
}
#endif
