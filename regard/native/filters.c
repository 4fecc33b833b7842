/* The bilateral filter and non-local means over a square window, in one pass over an image of float32
 * (channels, high, wide). Sums of neighbours stay in registers, or those of a band of rows in the cache;
 * regard/filters says the same with PyTorch. */
#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "vector.h"

enum { MOST_CHANNELS = 4, BAND = 32 };
static const double LOG2_E = 1.4426950408889634;

typedef struct {
  const float *image, *guide; /* the guide of a bilateral filter may be another image; of non-local means
                               * it is the image in mirror padding of half a patch */
  float *out;
  long channels, guides, high, wide, radius, patch, threads;
  double content, position, noise; /* factors in the exponent; what is added to it, at most up to 0 */
} Filter;

/* 2^x for x up to 0, right to 3 millionths of itself; 2^-100 and less is 2^-100. Of an average
 * whose weights sum to 1 or more neither is seen. */
INLINE vec exp2_down(vec x) {
  x = larger(x, all(-100.0f));
  vec sized = x + 12582912.0f; /* rounded by its own size: its last bits are the power */
  vec r = x - (sized - 12582912.0f);
  vec y = r * 9.5701018776e-03f + 5.5917861782e-02f;
  y = y * r + 2.4024744841e-01f;
  y = y * r + 6.9312181456e-01f;
  y = y * r + 9.9999926144e-01f;
  return (vec)((bits)y + ((bits)sized << 23));
}

static const int NUMBERS[2 * LANES] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

/* ---- bilateral: SIDE vectors of pixels beside each other at a time */

enum { SIDE = 2, BLOCK = SIDE * LANES };

INLINE void bilateral_block(const Filter *f, const int channels, const int guides, const float *image,
                            const float *guide, long step, long plane, long y, long x, float *out, long room) {
  vec own[MOST_CHANNELS][SIDE], sums[MOST_CHANNELS][SIDE], weights[SIDE];
  /* what is beside the image is 10^15 away, which must count even if no difference inside it does */
  const float content = (float)fmin(f->content * LOG2_E, -1e-20);
  const long r = f->radius, top = y < r ? -y : -r, end = y + r >= f->high ? f->high - 1 - y : r;
  for (int j = 0; j < SIDE; j++) {
    weights[j] = (vec){0};
    for (int c = 0; c < channels; c++) sums[c][j] = (vec){0};
    for (int c = 0; c < guides; c++) own[c][j] = load(guide + c * plane + y * step + x + j * LANES);
  }
  for (long down = top; down <= end; down++)
    for (long right = -r; right <= r; right++) {
      const float near = (float)((down * down + right * right) * f->position * LOG2_E);
      const long at = (y + down) * step + x + right;
      for (int j = 0; j < SIDE; j++) {
        vec score = {0};
        for (int c = 0; c < guides; c++) {
          vec apart = own[c][j] - load(guide + c * plane + at + j * LANES);
          score += apart * apart;
        }
        vec weight = exp2_down(score * content + near);
        weights[j] += weight;
        for (int c = 0; c < channels; c++) sums[c][j] += weight * load(image + c * plane + at + j * LANES);
      }
    }
  for (int c = 0; c < channels; c++) {
    float row[BLOCK];
    for (int j = 0; j < SIDE; j++) store(row + j * LANES, sums[c][j] / weights[j]);
    memcpy(out + c * f->high * f->wide, row, (room < BLOCK ? room : BLOCK) * sizeof(float));
  }
}

typedef struct {
  const Filter *filter;
  const float *image, *guide; /* with a margin on both sides */
  long step, plane;
} Padded;

static void bilateral_rows(const void *given, long part, long parts) {
  const Padded *p = given;
  const Filter *f = p->filter;
  for (long y = f->high * part / parts; y < f->high * (part + 1) / parts; y++)
    for (long x = 0; x < f->wide; x += BLOCK) {
      float *out = f->out + y * f->wide + x;
      const float *image = p->image + f->radius, *guide = p->guide + f->radius;
      if (f->channels == 1 && f->guides == 1)
        bilateral_block(f, 1, 1, image, guide, p->step, p->plane, y, x, out, f->wide - x);
      else if (f->channels == 3 && f->guides == 3)
        bilateral_block(f, 3, 3, image, guide, p->step, p->plane, y, x, out, f->wide - x);
      else
        bilateral_block(f, f->channels, f->guides, image, guide, p->step, p->plane, y, x, out, f->wide - x);
    }
}

/* rows of an image with a margin of `beside` */
static void widen(const float *from, float *to, long channels, const Filter *f, long step, float beside) {
  for (long row = 0; row < channels * f->high; row++, to += step) {
    for (long x = 0; x < step; x++) to[x] = beside;
    memcpy(to + f->radius, from + row * f->wide, f->wide * sizeof(float));
  }
}

/* returns 0 where there is no memory */
long regard_bilateral(const Filter *f) {
  long step = f->wide + 2 * f->radius + BLOCK, plane = f->high * step;
  float *both = malloc(((f->channels + f->guides) * plane + BLOCK) * sizeof(float));
  if (!both) return 0;
  Padded padded = {f, both, both + f->channels * plane, step, plane};
  widen(f->image, both, f->channels, f, step, 0.0f);
  widen(f->guide, both + f->channels * plane, f->guides, f, step, 1e15f);
  in_parts(bilateral_rows, &padded, f->threads < f->high ? f->threads : f->high);
  free(both);
  return 1;
}

/* ---- non-local means: bands of rows, offset by offset. Squared differences of the last rows, their sums
 * down a patch, and what becomes of them are all in the nearest cache. */

/* squared differences of a row of the padded image from one at an offset, (wide) numbers */
INLINE void differences(const int channels, const float *here, const float *there, long plane, long wide, float *to) {
  for (long x = 0; x < wide; x += LANES) {
    vec sum = {0};
    for (int c = 0; c < channels; c++) {
      vec d = load(here + c * plane + x) - load(there + c * plane + x);
      sum += d * d;
    }
    store(to + x, sum);
  }
}

INLINE void nlm_offset(const Filter *f, const int channels, const int side, long top, long rows, long down, long right,
                       float *ring, float *values, float *weights) {
  const float content = (float)(f->content * LOG2_E), noise = (float)(f->noise * LOG2_E);
  long margin = side - 1, step = f->wide + margin, plane = (f->high + margin) * step, room = step + 2 * LANES;
  long first = top + down < 0 ? -down : top, last = top + rows; /* rows whose neighbours there are */
  if (last + down > f->high) last = f->high - down;
  long left = right < 0 ? -right : 0, wide = f->wide - (right < 0 ? -right : right), band = rows * step + 2 * LANES;
  if (first >= last || wide <= 0) return;
  float *sums = ring + side * room; /* of `side` rows */
  memset(sums, 0, room * sizeof(float));
  for (long y = first; y < last + margin; y++) {
    const float *here = f->guide + y * step + left, *there = here + down * step + right;
    float *row = ring + y % side * room;
    if (y >= first + side)
      for (long x = 0; x < wide + margin; x += LANES) store(sums + x, load(sums + x) - load(row + x));
    differences(channels, here, there, plane, wide + margin, row);
    for (long x = 0; x < wide + margin; x += LANES) store(sums + x, load(sums + x) + load(row + x));
    if (y < first + margin) continue;
    long at = (y - margin - top) * step + left;
    const float *from = there + (margin / 2 - margin) * step + margin / 2;
    for (long x = 0; x < wide; x += LANES) {
      vec sum = load(sums + x);
      for (int k = 1; k < side; k++) sum += load(sums + x + k);
      vec weight = exp2_down(smaller(sum * content + noise, (vec){0}));
      if (wide - x < LANES) {
        whole inside;
        memcpy(&inside, NUMBERS, sizeof(inside));
        weight = pick(inside < (int)(wide - x), weight, (vec){0});
      }
      store(weights + at + x, load(weights + at + x) + weight);
      for (int c = 0; c < channels; c++) {
        float *to = values + c * band + at + x;
        store(to, load(to) + weight * load(from + c * plane + x));
      }
    }
  }
}

static void nlm_band(const Filter *f, long top, long rows, float *scratch) {
  long side = f->patch, step = f->wide + side - 1, band = rows * step + 2 * LANES, c = f->channels;
  float *values = scratch, *weights = values + c * band, *ring = weights + band;
  memset(scratch, 0, (c + 1) * band * sizeof(float));
  for (long down = -f->radius; down <= f->radius; down++)
    for (long right = -f->radius; right <= f->radius; right++)
      if (c == 1 && side == 7)
        nlm_offset(f, 1, 7, top, rows, down, right, ring, values, weights);
      else if (c == 3 && side == 7)
        nlm_offset(f, 3, 7, top, rows, down, right, ring, values, weights);
      else
        nlm_offset(f, (int)c, (int)side, top, rows, down, right, ring, values, weights);
  for (long i = 0; i < c; i++)
    for (long y = 0; y < rows; y++)
      for (long x = 0; x < f->wide; x++)
        f->out[(i * f->high + top + y) * f->wide + x] = values[i * band + y * step + x] / weights[y * step + x];
}

typedef struct {
  const Filter *filter;
  long *next;
  int *failed;
} Bands;

static void nlm_bands(const void *given, long part, long parts) {
  const Bands *bands = given;
  const Filter *f = bands->filter;
  long step = f->wide + f->patch - 1 + 2 * LANES;
  long room = (f->channels + 1) * (BAND + 1) * step + (f->patch + 1) * step;
  float *scratch = malloc(room * sizeof(float));
  (void)part, (void)parts;
  if (!scratch) {
    *bands->failed = 1;
    return;
  }
  memset(scratch, 0, room * sizeof(float));
  for (long top; (top = __atomic_fetch_add(bands->next, BAND, __ATOMIC_RELAXED)) < f->high;)
    nlm_band(f, top, f->high - top < BAND ? f->high - top : BAND, scratch);
  free(scratch);
}

/* the guide is the image in mirror padding, with room for LANES more numbers; returns 0 without memory */
long regard_nonlocal_means(const Filter *f) {
  long next = 0;
  int failed = 0;
  Bands bands = {f, &next, &failed};
  in_parts(nlm_bands, &bands, f->threads < f->high ? f->threads : f->high);
  return !failed;
}
