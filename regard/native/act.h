/* Activations, sixteen numbers at a time. */
#include "vector.h"

enum { RELU, GELU, GELU_TANH, SILU };

/* 1 / x for x from 1 to 10^30: a guess by its bits, made better three times; a division is slower */
INLINE vec inverse(vec x) {
  vec y = (vec)(0x7ef311c7u - (bits)x);
  y *= 2.0f - x * y;
  y *= 2.0f - x * y;
  y *= 2.0f - x * y;
  return y + y * (1.0f - x * y);
}

/* far below, where it is less than 10^-26, it is nothing: what it is multiplied by may be large */
INLINE vec sigmoid(vec x) {
  vec y = exp_lanes(-x);
  return pick(x < -60.0f, (vec){0}, inverse(1.0f + pick(y > 1e30f, all(1e30f), y)));
}

/* act(x), and its slope if that is asked for */
INLINE vec activate(long act, vec x, vec *slope) {
  if (act == RELU) {
    if (slope) *slope = pick(x > 0, all(1.0f), (vec){0});
    return pick(x > 0, x, pick(x == x, (vec){0}, x));
  }
  if (act == GELU) { /* x times the share of Gauss's curve below x (Abramowitz, Stegun 7.1.26) */
    vec z = x * 0.70710678f, size = pick(z < 0, -z, z);
    vec t = inverse(1.0f + 0.3275911f * pick(size > 1e9f, all(1e9f), size)), bell = exp_lanes(-z * z);
    vec y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = (y * t + 0.254829592f) * t * bell * 0.5f;
    y = pick(z < 0, y, 1.0f - y);
    if (slope) *slope = y + x * bell * 0.3989422804f;
    return x * y;
  }
  /* the hyperbolic tangent of GPT-2 is an exponential as well */
  vec z = act == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x), s = sigmoid(z);
  if (slope) {
    vec by = act == SILU ? all(1.0f) : 1.5957691216f * (1.0f + 0.134145f * x * x);
    vec steep = s * (1.0f - s);
    *slope = s + pick(steep == 0, (vec){0}, x * steep * by);
  }
  return x * s;
}
