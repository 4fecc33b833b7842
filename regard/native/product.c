/* Packing matrices, and rows times them: product.h says what is promised. */
#include "product.h"

int pack(Matrix *m, const Numbers *w, const float *bias, long first, long out, float never) {
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

/* what numbers up to `most` are multiplied by to be bytes; where they are too small for it they become none */
INLINE float per_number(float most) {
  float by = 127.0f / most;
  return by < INFINITY ? by : 0.0f;
}

int pack_bytes(Matrix *m) {
  long four = quads(m->in);
  m->bytes = aligned_alloc(64, (m->panels + 1) * four * PANEL * QUAD);
  m->scale = aligned_alloc(64, (m->panels + 1) * PANEL * sizeof(float));
  m->sums = aligned_alloc(64, (m->panels + 1) * PANEL * sizeof(int));
  if (!m->bytes || !m->scale || !m->sums) return 0;
  for (long row = 0; row < m->panels * PANEL; row++) {
    const float *w = m->packed + row / PANEL * m->in * PANEL + row % PANEL;
    signed char *to = m->bytes + (row / PANEL * four * PANEL + row % PANEL) * QUAD;
    float most = 0, wrong = 0;
    for (long k = 0; k < m->in; k++) {
      most = fabsf(w[k * PANEL]) > most ? fabsf(w[k * PANEL]) : most;
      wrong += w[k * PANEL] * 0.0f;
    }
    m->scale[row] = most / 127.0f + wrong;
    m->sums[row] = 0;
    for (long k = 0; k < four * QUAD; k++) {
      int byte = k < m->in && wrong == 0 ? (int)rintf(w[k * PANEL] * per_number(most)) : 0;
      to[k / QUAD * PANEL * QUAD + k % QUAD] = (signed char)byte;
      m->sums[row] -= 128 * byte;
    }
  }
  free(m->packed);
  m->packed = 0;
  return 1;
}

void release(Matrix *m) {
  free(m->packed);
  free(m->bias);
  free(m->bytes);
  free(m->scale);
  free(m->sums);
}

void round_rows(long m, const float *x, long in, Rounded *to) {
  long step = quads(in) * QUAD;
  for (long i = 0; i < m; i++, x += in) {
    bits large = {0}; /* of positive numbers the larger has the larger bits, and what is none the largest */
    for (long k = 0; k < in; k += LANES)
      large = larger_bits(large, (bits)load_some(x + k, in - k) & 0x7fffffffu);
    for (int j = 1; j < LANES; j++) large[0] = large[j] > large[0] ? large[j] : large[0];
    float most = ((vec)large)[0], wrong = most * 0.0f, by = per_number(most);
    for (long k = 0; k < step; k += LANES) { /* rounded by their own size; what follows is 0, too */
      typedef unsigned char byte_vec __attribute__((vector_size(16), aligned(1)));
      unsigned char *end = to->bytes + i * step + k;
      vec y = load_some(x + k, in - k) * by + (12582912.0f + 128.0f);
      byte_vec made = __builtin_convertvector((bits)y - (bits)all(12582912.0f), byte_vec);
      if (step - k < LANES) memcpy(end, &made, step - k);
      else *(byte_vec *)end = made;
    }
    to->scale[i] = most / 127.0f + wrong;
  }
}

INLINE void finish(int how, float *y, vec sum) {
  switch (how) {
  case ADD: sum += load(y); break;
  case TIMES: sum *= load(y); break;
  case RECTIFY: sum = larger((vec){0}, sum); break; /* what is no number stays none */
  }
  store(y, sum);
}

static inline void activate_tile(long m, float *y, long y_step, long act) {
  for (long i = 0; i < m; i++)
    for (long c = 0; c < PANEL; c += LANES) store(y + i * y_step + c, activate(act, load(y + i * y_step + c), 0));
}

/* m rows times a panel; where memory is far, it helps to fetch what is `ahead` of it meanwhile */
INLINE void tile(const int m, const float *x, long x_step, const float *w, const float *bias, long in,
                 float *y, long y_step, int how, long ahead) {
  vec sums[TALL][SIDE];
#pragma GCC unroll 12
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) sums[i][j] = load(bias + j * LANES);
  for (long k = 0; k < in; k++, w += PANEL) {
    vec part[SIDE];
    for (int j = 0; m > 3 && j < SIDE; j++) __builtin_prefetch(w + ahead + j * LANES, 0, 2);
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) part[j] = load(w + j * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      float one = x[i * x_step + k];
#pragma GCC unroll 2
      for (int j = 0; j < SIDE; j++) sums[i][j] += one * part[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) finish(how, y + i * y_step + j * LANES, sums[i][j]);
}

/* four bytes of a row times four of each column, added to sums */
INLINE whole add_quad(whole sum, unsigned four, const signed char *w) {
#ifdef __AVX512VNNI__
  return (whole)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)four), _mm512_loadu_si512(w));
#else
  for (int c = 0; c < LANES; c++)
    for (int j = 0; j < QUAD; j++) sum[c] += (int)(four >> (8 * j) & 255) * w[c * QUAD + j];
  return sum;
#endif
}

/* the same in bytes */
INLINE void byte_tile(const int m, const unsigned char *x, long x_step, const float *scale, const Matrix *w,
                      long p, float *y, long y_step, int how) {
  whole sums[TALL][SIDE];
  long four = quads(w->in);
  const signed char *panel = w->bytes + p * four * PANEL * QUAD;
#pragma GCC unroll 12
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int j = 0; j < SIDE; j++) sums[i][j] = *(const whole *)(w->sums + p * PANEL + j * LANES);
  for (long k = 0; k < four; k++, panel += PANEL * QUAD)
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      unsigned one;
      memcpy(&one, x + i * x_step + k * QUAD, QUAD);
#pragma GCC unroll 2
      for (int j = 0; j < SIDE; j++) sums[i][j] = add_quad(sums[i][j], one, panel + j * LANES * QUAD);
    }
#pragma GCC unroll 2
  for (int j = 0; j < SIDE; j++) {
    vec by = load(w->scale + p * PANEL + j * LANES), first = load(w->bias + p * PANEL + j * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      vec value = __builtin_convertvector(sums[i][j], vec) * (scale[i] * by) + first;
      finish(how, y + i * y_step + j * LANES, value);
    }
  }
}

void multiply(long m, const float *x, const Rounded *rounded, const Matrix *w, long from, long to, float *y,
              long y_step, long columns, int how, long act) {
  long blocks = (m + TALL - 1) / TALL, x_step = w->bytes ? quads(w->in) * QUAD : w->in;
  float part[TALL * PANEL] __attribute__((aligned(64))) = {0}; /* for the last panel, if y has less than it */
  int activates = how == ACTIVATE && act != RELU;
  how = how != ACTIVATE ? how : activates ? STORE : RECTIFY;
  for (long p = from; p < to; p++) {
    const float *panel = w->packed + p * w->in * PANEL, *bias = w->bias + p * PANEL;
    long room = columns - (p - from) * PANEL, row = 0, step = room < PANEL ? PANEL : y_step;
    for (long b = 0; b < blocks; b++) { /* of about as many rows */
      int some = (int)(m / blocks + (b < m % blocks));
      const float *in = x + row * x_step, *scale = rounded->scale + row;
      const unsigned char *bytes = rounded->bytes + row * x_step;
      float *end = y + row * y_step + (p - from) * PANEL, *out = room < PANEL ? part : end;
      row += some;
      long ahead = b == blocks - 1 ? w->in * PANEL : 0; /* the next panel */
      if (out == part)
        for (long i = 0; i < some; i++) memcpy(part + i * PANEL, end + i * y_step, room * sizeof(float));
#define ROWS(n)                                                                              \
  case n:                                                                                    \
    if (w->bytes)                                                                            \
      byte_tile(n, bytes, x_step, scale, w, p, out, step, how);                              \
    else                                                                                     \
      tile(n, in, x_step, panel, bias, w->in, out, step, how, ahead);                        \
    break;
      switch (some) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#ifdef __AVX512F__
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
      }
#undef ROWS
      if (activates) activate_tile(some, out, step, act);
      if (out == part)
        for (long i = 0; i < some; i++) memcpy(end + i * y_step, part + i * PANEL, room * sizeof(float));
    }
  }
}

void product(long m, const float *x, Rounded *rounded, const Matrix *w, float *y, int how, long act) {
  if (w->bytes) round_rows(m, x, w->in, rounded);
  multiply(m, x, rounded, w, 0, w->panels, y, w->out, w->out, how, act);
}
