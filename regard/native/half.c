/* Attention in bfloat16: products of bfloat16 numbers, summed in float32, as is the softmax. */
#include <stdlib.h>
#include <string.h>

#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

enum { D = 64, PANEL = 64, TILE = 6, ROWS = 24 }; /* of a head, keys, rows of a product, queries */

/* c = a b for TILE rows of a, where b has PANEL columns and its rows lie in pairs: (k / 2, PANEL, 2) */
INLINE void product(const short *a, long step, const short *b, long pairs, float *c, long c_step) {
  __m512 sum[TILE][4];
  for (long r = 0; r < TILE; r++)
    for (long j = 0; j < 4; j++) sum[r][j] = _mm512_setzero_ps();
  for (long p = 0; p < pairs; p++) {
    __m512bh some[4];
    for (long j = 0; j < 4; j++) some[j] = (__m512bh)_mm512_loadu_si512(b + 2 * PANEL * p + 32 * j);
    for (long r = 0; r < TILE; r++) {
      int two;
      memcpy(&two, a + r * step + 2 * p, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(two);
      for (long j = 0; j < 4; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], both, some[j]);
    }
  }
  for (long r = 0; r < TILE; r++)
    for (long j = 0; j < 4; j++) _mm512_storeu_ps(c + r * c_step + 16 * j, sum[r][j]);
}

/* scores (keys) to e^(scale (score - largest)) in bfloat16; returns the sum of these */
static float weigh(float *scores, long keys, long padded, float scale, short *to) {
  for (long c = keys; c < padded; c++) scores[c] = -INFINITY;
  vec most = load(scores), sum = {0};
  for (long c = LANES; c < padded; c += LANES) most = pick(load(scores + c) > most, load(scores + c), most);
  float top = largest(most);
  for (long c = 0; c < padded; c += LANES) {
    vec e = exp_lanes((load(scores + c) - top) * scale);
    sum += e;
    _mm256_storeu_si256((__m256i *)(to + c), (__m256i)_mm512_cvtneps_pbh((__m512)e));
  }
  return total(sum);
}

/* One head: queries (rows, D), keys and values (keys, D), whose rows are `step` numbers apart. */
static void head(const short *q, const short *k, const short *v, const long *step, long rows,
                 long keys, float scale, short *out, char *room) {
  long padded = (keys + PANEL - 1) / PANEL * PANEL;
  short *k_pairs = (short *)room, *v_pairs = k_pairs + padded * D, *some = v_pairs + padded * D;
  short *weights = some + ROWS * D;
  float *scores = (float *)(weights + ROWS * padded), *made = scores + ROWS * padded;
  memset(room, 0, 2 * padded * D * sizeof(short));
  for (long i = 0; i < keys; i++) {
    short *panel = k_pairs + i / PANEL * PANEL * D + i % PANEL * 2, *pair = v_pairs + i / 2 * 2 * D + i % 2;
    for (long c = 0; c < D; c += 2) memcpy(panel + c * PANEL, k + i * step[1] + c, 4);
    for (long c = 0; c < D; c++) pair[2 * c] = v[i * step[2] + c];
  }
  for (long first = 0; first < rows; first += ROWS) {
    long count = rows - first < ROWS ? rows - first : ROWS;
    memset(some, 0, ROWS * D * sizeof(short));
    for (long i = 0; i < count; i++) memcpy(some + i * D, q + (first + i) * step[0], D * sizeof(short));
    for (long c = 0; c < padded; c += PANEL)
      for (long r = 0; r < count; r += TILE)
        product(some + r * D, D, k_pairs + c * D, D / 2, scores + r * padded + c, padded);
    float sums[ROWS];
    for (long i = 0; i < (count + TILE - 1) / TILE * TILE; i++)
      sums[i] = weigh(scores + i * padded, keys, padded, scale, weights + i * padded);
    for (long r = 0; r < count; r += TILE)
      product(weights + r * padded, padded, v_pairs, padded / 2, made + r * D, D);
    for (long i = 0; i < count; i++)
      for (long c = 0; c < D; c += LANES) {
        vec y = load(made + i * D + c) / sums[i];
        _mm256_storeu_si256((__m256i *)(out + (first + i) * step[3] + c),
                            (__m256i)_mm512_cvtneps_pbh((__m512)y));
      }
  }
}
#endif

/* n: batch, heads, heads of keys, queries, keys, width of a head, none; then the steps of batch, head
 * and place in queries, keys, values, none, and what is returned, as regard_attend has them. `done`
 * is 0 where there is no such kernel. */
void regard_attend_half(const long *n, const short *q, const short *k, const short *v, double scale,
                        short *out, long *done) {
  *done = 0;
#ifdef __AVX512BF16__
  long h = n[1], keys = n[4], padded = (keys + PANEL - 1) / PANEL * PANEL, failed = 0;
  if (n[5] != D || keys < 1) return;
  long bytes = 2 * (2 * padded * D + ROWS * D + ROWS * padded) + 4 * ROWS * (padded + D);
#pragma omp parallel for schedule(static) reduction(+ : failed)
  for (long i = 0; i < n[0] * h; i++) {
    const long *at = n + 7, b = i / h, one = i % h, group = one / (h / n[2]);
    const long step[4] = {at[2], at[5], at[8], at[14]};
    char *room = malloc(bytes);
    if (room)
      head(q + b * at[0] + one * at[1], k + b * at[3] + group * at[4], v + b * at[6] + group * at[7],
           step, n[3], keys, scale, out + b * at[12] + one * at[13], room);
    failed += !room;
    free(room);
  }
  *done = !failed;
#endif
}
