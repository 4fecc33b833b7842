/* Sixteen numbers at a time: the compiler makes of this what the processor has. */
#include <math.h>

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef int whole __attribute__((vector_size(64)));
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

INLINE float total(vec x) {
  half_vec a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  quarter_vec b =
      __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[1]) + (b[2] + b[3]);
}

INLINE float largest(vec x) {
  vec a = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  a = pick(a > x, a, x);
  vec b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  b = pick(b > a, b, a);
  float one = b[0] > b[1] ? b[0] : b[1], two = b[2] > b[3] ? b[2] : b[3];
  return one > two ? one : two;
}

/* e^x to the last digit or two; what is below the smallest float is nothing. */
INLINE vec exp_lanes(vec x) {
  whole none = x < all(-87.3f);
  x = pick(x > all(88.7f), all(88.7f), x);
  vec n = x * 1.44269504f + 12582912.0f; /* rounded to a whole number by its own size */
  bits power = (bits)n - (bits)all(12582912.0f);
  n -= 12582912.0f;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  y = pick(none, (vec){0}, (vec)((bits)y + (power << 23)));
  return pick(x == x, y, x);
}
