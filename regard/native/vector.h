/* Sixteen numbers at a time: the compiler makes of this what the processor has. */
#include <math.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef int whole __attribute__((vector_size(64)));
typedef int loose_whole __attribute__((vector_size(64), aligned(4)));
typedef unsigned bits __attribute__((vector_size(64))); /* whose sums may pass the end */
typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const loose *)from; }
/* the upper halves of sixteen numbers, as bfloat16 has them */
typedef unsigned short uppers __attribute__((vector_size(32), aligned(2)));
INLINE vec load_half(const unsigned short *from) {
  return (vec)(__builtin_convertvector(*(const uppers *)from, bits) << 16);
}
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(whole which, vec a, vec b) { return (vec)((which & (whole)a) | (~which & (whole)b)); }

/* `count` numbers, at most LANES, and zeros */
INLINE vec load_some(const float *from, long count) {
  if (count >= LANES) return load(from);
  vec some = {0};
  memcpy(&some, from, count * sizeof(float));
  return some;
}

INLINE void store_some(float *to, vec x, long count) {
  if (count >= LANES) store(to, x);
  else memcpy(to, &x, count * sizeof(float));
}

/* x in the first `count` places, and y in the others */
INLINE vec pick_first(long count, vec x, vec y) {
  const whole places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return pick(places < (int)(count < LANES ? count : LANES), x, y);
}

/* a bit for each number that is larger than y */
INLINE unsigned above(vec x, float y) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_GT_OQ);
#else
  unsigned found = 0;
  for (int i = 0; i < LANES; i++) found |= (unsigned)(x[i] > y) << i;
  return found;
#endif
}

/* the larger of each two numbers; b where one of them is none */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return pick(a > b, a, b);
#endif
}

INLINE vec smaller(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return pick(a < b, a, b);
#endif
}

/* x one place later, after another number */
INLINE vec after_one(vec x, float first) {
  return __builtin_shufflevector(all(first), x, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
}

INLINE bits larger_bits(bits a, bits b) {
#ifdef __AVX512F__
  return (bits)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
  return (bits)pick(a > b, (vec)a, (vec)b);
#endif
}

INLINE float total(vec x) {
  half_vec a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  quarter_vec b =
      __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[1]) + (b[2] + b[3]);
}

INLINE float largest(vec x) {
  vec a = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  a = larger(a, x);
  vec b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  b = larger(b, a);
  float one = b[0] > b[1] ? b[0] : b[1], two = b[2] > b[3] ? b[2] : b[3];
  return one > two ? one : two;
}

/* the totals of sixteen vectors, side by side */
INLINE vec totals(const vec *x) {
  vec a[8], b[4], c[2];
#define FOLD(p, q, ...) (__builtin_shufflevector(p, q, __VA_ARGS__))
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = FOLD(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           FOLD(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    b[i] = FOLD(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           FOLD(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    c[i] = FOLD(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           FOLD(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return FOLD(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         FOLD(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#undef FOLD
}

/* e^x to the last digit or two; what is below the smallest float is nothing. */
INLINE vec exp_lanes(vec x) {
#ifdef __AVX512F__
  __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  x = (vec)_mm512_min_ps(_mm512_set1_ps(88.7f), (__m512)x);
#else
  whole none = x < all(-87.3f);
  x = pick(x > all(88.7f), all(88.7f), x);
#endif
  vec sized = x * 1.44269504f + 12582912.0f, n = sized - 12582912.0f; /* rounded by its own size */
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_maskz_scalef_ps(some, (__m512)y, (__m512)n);
#else
  y = pick(none, (vec){0}, (vec)((bits)y + (((bits)sized - (bits)all(12582912.0f)) << 23)));
  return pick(x == x, y, x);
#endif
}

/* e^x for x up to 0 that is summed with e^0: right to 10^-7 of that */
INLINE vec exp_near(vec x) {
#ifdef __AVX512DQ__
  vec t = x * 1.44269504f, r = (vec)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF);
  vec y = r * 1.8775766803e-03f + 8.9893402833e-03f;
  y = y * r + 5.5826317671e-02f;
  y = y * r + 2.4015361728e-01f;
  y = y * r + 6.9315307315e-01f;
  y = y * r + 9.9999992507e-01f;
  return (vec)_mm512_scalef_ps((__m512)y, (__m512)t);
#else
  return exp_lanes(x);
#endif
}
