/* The argmax of each row of logits, and its log-probability. */
#include <stdlib.h>

#include "vector.h"

enum { PART = 4096 };

/* for rows of logits: where the first largest is, and its log-probability */
void regard_argmax(const float *logits, long rows, long count, long *best, float *likely) {
  long parts = (count + PART - 1) / PART;
  float *tops = malloc((2 * rows * parts + 1) * sizeof(float)), *sums = tops + rows * parts;
#pragma omp parallel for schedule(static)
  for (long part = 0; part < rows * parts; part++) {
    long first = part % parts * PART, some = count - first < PART ? count - first : PART, c = 0;
    const float *x = logits + part / parts * count + first;
    vec most = all(-INFINITY), all_sums = {0};
    float top = -INFINITY, sum = 0;
    for (; c + LANES <= some; c += LANES) most = pick(load(x + c) > most, load(x + c), most);
    top = largest(most);
    for (; c < some; c++) top = x[c] > top ? x[c] : top;
    if (top == -INFINITY) { /* nothing is possible here, or not a number */
      for (c = 0; c < some; c++) sum += x[c] != x[c] ? NAN : 0.0f;
      some = 0;
    }
    for (c = 0; c + LANES <= some; c += LANES) all_sums += exp_lanes(load(x + c) - top);
    for (; c < some; c++) sum += expf(x[c] - top);
    tops[part] = top;
    sums[part] = sum + total(all_sums);
  }
  for (long i = 0; i < rows; i++) {
    const float *top = tops + i * parts, *x = logits + i * count;
    long which = 0;
    float sum = 0;
    for (long part = 1; part < parts; part++)
      if (top[part] > top[which]) which = part;
    for (long part = 0; part < parts; part++)
      sum += sums[i * parts + part] * (top[part] == -INFINITY ? 1.0f : expf(top[part] - top[which]));
    long place = which * PART;
    while (place < count && x[place] != top[which]) place++;
    best[i] = place < count ? place : 0;
    likely[i] = top[which] == -INFINITY ? NAN : -logf(sum);
  }
  free(tops);
}
