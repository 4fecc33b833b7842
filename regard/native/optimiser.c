/* A step of AdamW for many tensors, and the L2 norm of their gradients. */
#include <stdlib.h>

#include "vector.h"

enum { PART = 16384 };

/* what is to be done in one go: some numbers of one tensor */
typedef struct {
  long tensor, first, count;
} Piece;

static long pieces(const long *sizes, long count, Piece *to) {
  long n = 0;
  for (long i = 0; i < count; i++)
    for (long first = 0; first < sizes[i]; first += PART, n++)
      if (to) to[n] = (Piece){i, first, sizes[i] - first < PART ? sizes[i] - first : PART};
  return n;
}

/* the sum of all squares, in an order that no number of threads changes */
void regard_squares(long count, const float *const *x, const long *sizes, double *sum) {
  long n = pieces(sizes, count, 0);
  Piece *each = malloc((n + 1) * sizeof(Piece));
  double *sums = malloc((n + 1) * sizeof(double));
  pieces(sizes, count, each);
#pragma omp parallel for schedule(static)
  for (long i = 0; i < n; i++) {
    const float *from = x[each[i].tensor] + each[i].first;
    double all = 0; /* of short stretches, so that little is lost however a compiler adds up */
    for (long start = 0; start < each[i].count; start += 256) {
      long end = start + 256 < each[i].count ? start + 256 : each[i].count;
      float some = 0;
#pragma omp simd reduction(+ : some)
      for (long j = start; j < end; j++) some += from[j] * from[j];
      all += some;
    }
    sums[i] = all;
  }
  *sum = 0;
  for (long i = 0; i < n; i++) *sum += sums[i];
  free(sums);
  free(each);
}

/* p falls by rate[i], after it has decayed by keep[i]; far[i] is 1 / sqrt(1 - beta2^t) */
void regard_adamw(long count, float *const *p, const float *const *g, float *const *m,
                  float *const *v, const long *sizes, const double *rate, const double *keep,
                  const double *far, double beta1, double beta2, double eps) {
  long n = pieces(sizes, count, 0);
  Piece *each = malloc((n + 1) * sizeof(Piece));
  pieces(sizes, count, each);
#pragma omp parallel for schedule(static)
  for (long i = 0; i < n; i++) {
    long t = each[i].tensor, first = each[i].first;
    float *to = p[t] + first, *mean = m[t] + first, *square = v[t] + first;
    const float *grad = g[t] + first;
    float by = (float)rate[t], stay = (float)keep[t], wide = (float)far[t], least = (float)eps;
    float one = (float)beta1, two = (float)beta2, new_one = (float)(1 - beta1);
    float new_two = (float)(1 - beta2);
#pragma omp simd
    for (long j = 0; j < each[i].count; j++) {
      mean[j] = one * mean[j] + new_one * grad[j];
      square[j] = two * square[j] + new_two * grad[j] * grad[j];
      to[j] = to[j] * stay - by * mean[j] / (sqrtf(square[j]) * wide + least);
    }
  }
  free(each);
}
