/* Rows times a matrix that was packed once: panels of SIDE vectors of columns, and TALL rows of sums
 * in registers. A row is summed in one order, whatever stands beside it, so that its result has the
 * same bits in every batch. A matrix may be packed in bytes: then rows are rounded to bytes, too, and
 * the sums are whole numbers, the same on every processor. */
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

/* what becomes of a product: it is stored, added to what is there, activated, or multiplies it;
 * RECTIFY is how RELU is done */
enum { STORE, ADD, ACTIVATE, TIMES, RECTIFY };

typedef struct {
  const float *at; /* may be missing */
  long rows, columns, row_step, column_step;
} Numbers;

typedef struct {
  long in, out, panels;
  float *packed, *bias; /* (panels, in, PANEL) and (panels, PANEL) */
  /* in bytes instead: (panels, in / 4, PANEL, 4), of which each row was divided by its scale */
  signed char *bytes;
  float *scale;
  int *sums; /* what the bytes of a row begin with: -128 times their sum, as x is stored plus 128 */
} Matrix;

/* rows that were rounded to bytes: x = scale * (byte - 128) */
typedef struct {
  unsigned char *bytes; /* (rows, in, up to a multiple of 4) */
  float *scale;
} Rounded;

enum { QUAD = 4 };
INLINE long quads(long in) { return (in + QUAD - 1) / QUAD; }

/* what is the same for every file is compiled once, and seen by no other library */
#define SHARED __attribute__((visibility("hidden")))

/* pack rows `first` to `first + out` of weights (out, in) with their bias; `never` fills up the bias */
SHARED int pack(Matrix *m, const Numbers *w, const float *bias, long first, long out, float never);
/* pack in bytes what pack() packed; a row with a number that is not finite gives none that is */
SHARED int pack_bytes(Matrix *m);
SHARED void release(Matrix *m);

SHARED void round_rows(long m, const float *x, long in, Rounded *to);
/* m rows x (m, in), or rounded ones, times panels `from` to `to` into y, rows of which are y_step apart
 * and have so many columns from here on */
SHARED void multiply(long m, const float *x, const Rounded *rounded, const Matrix *w, long from, long to, float *y,
                     long y_step, long columns, int how, long act);
/* the whole product; `rounded` is room for rows in bytes */
SHARED void product(long m, const float *x, Rounded *rounded, const Matrix *w, float *y, int how, long act);
#endif
