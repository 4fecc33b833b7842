/* Attention over short texts, and a whole block of a stack, forward and back, for training: each
 * thread takes some texts through the block, so that what it makes stays in its cache. */
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "act.h"
#include "rows.h"

INLINE long up(long x) { return (x + LANES - 1) / LANES * LANES; }

/* c (rows, 16 n) = sum over t of a[row, t] b[t]; rows of b and c are vectors one after the other */
INLINE void strip(int m, int n, const float *a, long a_row, long a_t, const float *b, long b_t,
                  float *c, long c_row, long first, long last, int more) {
  vec sums[8][3];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++)
      sums[i][j] = more ? load(c + i * c_row + j * LANES) : (vec){0};
  for (long t = first; t < last; t++) {
    vec part[3];
    for (int j = 0; j < n; j++) part[j] = load(b + t * b_t + j * LANES);
    for (int i = 0; i < m; i++)
      for (int j = 0; j < n; j++) sums[i][j] += a[i * a_row + t * a_t] * part[j];
  }
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) store(c + i * c_row + j * LANES, sums[i][j]);
}

/* eight rows of such a product, of any width */
static void strips(const float *a, long a_row, long a_t, const float *b, long b_t, float *c,
                   long c_row, long width, long first, long last, int more) {
  for (long j = 0; j < width;) {
    long left = (width - j) / LANES, n = left == 4 ? 2 : left < 3 ? left : 3;
    if (n == 3)
      strip(8, 3, a, a_row, a_t, b + j, b_t, c + j, c_row, first, last, more);
    else if (n == 2)
      strip(8, 2, a, a_row, a_t, b + j, b_t, c + j, c_row, first, last, more);
    else
      strip(8, 1, a, a_row, a_t, b + j, b_t, c + j, c_row, first, last, more);
    j += n * LANES;
  }
}

typedef struct {
  long b, h, g, q, k, d, causal;
  long q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, bias_b, bias_h, bias_q;
  long out_b, out_h, out_l, grad_b, grad_h, grad_l;
  long dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l;
} Sizes;

/* a head's rows, padded by zeros; tells whether all of them are finite */
static int take(const float *from, long step, float *to, long rows, long d) {
  vec sums = {0};
  long wide = up(d), even = d / LANES * LANES;
  for (long i = 0; i < rows; i++, to += wide, from += step) {
    for (long c = 0; c < even; c += LANES) {
      vec x = load(from + c);
      store(to + c, x);
      sums += x * 0.0f;
    }
    if (even < d) {
      vec rest = {0};
      for (long c = even; c < d; c++) rest[c - even] = from[c];
      store(to + even, rest);
      sums += rest * 0.0f;
    }
  }
  memset(to, 0, (up(rows) - rows) * wide * sizeof(float));
  return total(sums) == 0.0f;
}

static void give(const float *from, float *to, long step, long rows, long d) {
  long wide = up(d), even = d / LANES * LANES;
  for (long i = 0; i < rows; i++, from += wide, to += step) {
    for (long c = 0; c < even; c += LANES) store(to + c, load(from + c));
    for (long c = even; c < d; c++) to[c] = from[c];
  }
}

/* rows for columns among sixteen vectors: first halves change places, then quarters, and so on */
INLINE void turn_square(const float *from, long from_step, float *to, long to_step) {
  vec row[LANES];
  for (int i = 0; i < LANES; i++) row[i] = load(from + i * from_step);
  for (int i = 0; i < LANES; i++)
    if (!(i & 8)) {
      vec a = row[i], b = row[i + 8];
      row[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      row[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
  for (int i = 0; i < LANES; i++)
    if (!(i & 4)) {
      vec a = row[i], b = row[i + 4];
      row[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      row[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  for (int i = 0; i < LANES; i++)
    if (!(i & 2)) {
      vec a = row[i], b = row[i + 2];
      row[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      row[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < LANES; i++)
    if (!(i & 1)) {
      vec a = row[i], b = row[i + 1];
      row[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
      row[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
  for (int i = 0; i < LANES; i++) store(to + i * to_step, row[i]);
}

static void turn(const float *from, float *to, long rows, long columns) {
  for (long i = 0; i < rows; i += LANES)
    for (long j = 0; j < columns; j += LANES)
      turn_square(from + i * columns + j, columns, to + j * rows + i, rows);
}

/* how many keys the queries up to a row see at most */
INLINE long sight(const Sizes *n, long row) {
  return n->causal && row + 1 < n->k ? row + 1 : n->k;
}

/* Beyond this, single precision knows scores to less than three digits after the point, so that
 * weights and gradients are made of rounding, PyTorch's as ours: such scores are left to PyTorch. */
#define LARGEST_SCORE 8192.0f

/* scores of eight queries, their bias added; tells whether they were finite and small before */
static int scores(const Sizes *n, const float *q, const float *turned, const float *bias,
                   float scale, float *s, long row) {
  long keys = up(n->k), seen = up(sight(n, row + 7));
  vec sums = {0}, tops = {0};
  strips(q + row * up(n->d), up(n->d), 1, turned, keys, s, keys, seen, 0, up(n->d), 0);
  for (long i = 0; i < 8; i++) {
    const float *more = bias && row + i < n->q ? bias + (row + i) * n->bias_q : 0;
    for (long j = 0; j < seen; j += LANES) {
      vec x = load(s + i * keys + j) * scale;
      store(s + i * keys + j, x);
      sums += x * 0.0f;
      tops = pick(x * x > tops, x * x, tops);
    }
    if (more)
      for (long j = 0; j < sight(n, row + i); j++) s[i * keys + j] += more[j];
  }
  return total(sums) == 0.0f && largest(tops) < LARGEST_SCORE * LARGEST_SCORE;
}

/* memory for one group of heads, forward and back */
INLINE long room(const Sizes *n) {
  long wide = up(n->d), keys = up(n->k), queries = up(n->q);
  return (3 * keys + 2 * queries + 8) * wide + 8 * keys;
}
INLINE long room_back(const Sizes *n) {
  long wide = up(n->d), keys = up(n->k), queries = up(n->q);
  return (6 * keys + 4 * queries) * wide + 2 * queries * keys;
}

/* the heads that share keys and values: tells whether these and their scores are finite */
static int attend(const Sizes *n, long b, long group, const float *q, const float *k,
                  const float *v, const float *bias, float scale, float *out, float *spread,
                  float *own_k) {
  long wide = up(n->d), keys = up(n->k), queries = up(n->q), each = n->h / n->g;
  float *own_v = own_k + keys * wide, *turned = own_v + keys * wide;
  float *own_q = turned + keys * wide, *y = own_q + queries * wide, *s = y + queries * wide;
  int good = take(k + b * n->k_b + group * n->k_h, n->k_l, own_k, n->k, n->d);
  good &= take(v + b * n->v_b + group * n->v_h, n->v_l, own_v, n->k, n->d);
  turn(own_k, turned, keys, wide);
  for (long head = group * each; head < (group + 1) * each; head++) {
    const float *plus = bias ? bias + b * n->bias_b + head * n->bias_h : 0;
    take(q + b * n->q_b + head * n->q_h, n->q_l, own_q, n->q, n->d);
    for (long row = 0; row < queries; row += 8) {
      good &= scores(n, own_q, turned, plus, scale, s, row);
      for (long i = 0; i < 8; i++) {
        long seen = row + i < n->q ? sight(n, row + i) : 0, full = up(sight(n, row + 7));
        float *w = s + i * keys;
        vec sums = {0}, tops = all(-INFINITY);
        for (long j = seen; j < full; j++) w[j] = -INFINITY;
        for (long j = 0; j < full; j += LANES) tops = pick(load(w + j) > tops, load(w + j), tops);
        float most = largest(tops), from = most == -INFINITY ? 0.0f : most;
        for (long j = 0; j < full; j += LANES) {
          vec p = exp_lanes(load(w + j) - from);
          store(w + j, p);
          sums += p;
        }
        float sum = total(sums), share = sum > 0 ? 1.0f / sum : 0.0f;
        if (sum != sum) share = sum;
        for (long j = 0; j < full; j += LANES) store(w + j, load(w + j) * share);
        if (row + i < n->q) {
          float *about = spread + 2 * ((b * n->h + head) * n->q + row + i);
          about[0] = from;
          about[1] = share;
        }
      }
      strips(s, keys, 1, own_v, wide, y + row * wide, wide, wide, 0, sight(n, row + 7), 0);
    }
    give(y, out + b * n->out_b + head * n->out_h, n->out_l, n->q, n->d);
  }
  return good;
}

static void attend_back(const Sizes *n, long b, long group, const float *q, const float *k,
                        const float *v, const float *bias, float scale, const float *out,
                        const float *spread, const float *grad, float *dq, float *dk, float *dv,
                        float *own_k) {
  long wide = up(n->d), keys = up(n->k), queries = up(n->q), each = n->h / n->g;
  float *own_v = own_k + keys * wide, *turned_k = own_v + keys * wide;
  float *turned_v = turned_k + keys * wide, *own_dk = turned_v + keys * wide;
  float *own_dv = own_dk + keys * wide, *own_q = own_dv + keys * wide;
  float *own_grad = own_q + queries * wide, *own_out = own_grad + queries * wide;
  float *own_dq = own_out + queries * wide, *p = own_dq + queries * wide;
  float *s = p + queries * keys;
  take(k + b * n->k_b + group * n->k_h, n->k_l, own_k, n->k, n->d);
  take(v + b * n->v_b + group * n->v_h, n->v_l, own_v, n->k, n->d);
  turn(own_k, turned_k, keys, wide);
  turn(own_v, turned_v, keys, wide);
  for (long head = group * each; head < (group + 1) * each; head++) {
    const float *plus = bias ? bias + b * n->bias_b + head * n->bias_h : 0;
    const float *about = spread + 2 * (b * n->h + head) * n->q;
    take(q + b * n->q_b + head * n->q_h, n->q_l, own_q, n->q, n->d);
    take(grad + b * n->grad_b + head * n->grad_h, n->grad_l, own_grad, n->q, n->d);
    take(out + b * n->out_b + head * n->out_h, n->out_l, own_out, n->q, n->d);
    for (long row = 0; row < queries; row += 8) {
      long full = up(sight(n, row + 7));
      float *w = p + row * keys, *g = s + row * keys;
      scores(n, own_q, turned_k, plus, scale, w, row);
      strips(own_grad + row * wide, wide, 1, turned_v, keys, g, keys, full, 0, wide, 0);
      for (long i = 0; i < 8; i++, w += keys, g += keys) {
        long seen = row + i < n->q ? sight(n, row + i) : 0;
        float from = row + i < n->q ? about[2 * (row + i)] : 0.0f;
        float share = row + i < n->q ? about[2 * (row + i) + 1] : 0.0f;
        const float *x = own_grad + (row + i) * wide, *y = own_out + (row + i) * wide;
        vec sums = {0};
        for (long c = 0; c < wide; c += LANES) sums += load(x + c) * load(y + c);
        float mean = total(sums);
        for (long j = seen; j < full; j++) w[j] = -INFINITY;
        for (long j = 0; j < full; j += LANES) {
          vec weight = exp_lanes(load(w + j) - from) * share;
          store(w + j, weight);
          store(g + j, weight * (load(g + j) - mean) * scale);
        }
      }
      strips(s + row * keys, keys, 1, own_k, wide, own_dq + row * wide, wide, wide, 0,
             sight(n, row + 7), 0);
    }
    int more = head > group * each;
    for (long row = 0; row < keys; row += 8) {
      long first = !n->causal ? 0 : row < n->q ? row : n->q;
      strips(p + row, 1, keys, own_grad, wide, own_dv + row * wide, wide, wide, first, n->q, more);
      strips(s + row, 1, keys, own_q, wide, own_dk + row * wide, wide, wide, first, n->q, more);
    }
    give(own_dq, dq + b * n->dq_b + head * n->dq_h, n->dq_l, n->q, n->d);
  }
  give(own_dk, dk + b * n->dk_b + group * n->dk_h, n->dk_l, n->k, n->d);
  give(own_dv, dv + b * n->dv_b + group * n->dv_h, n->dv_l, n->k, n->d);
}

void regard_attend(const Sizes *n, const float *q, const float *k, const float *v,
                   const float *bias, double scale, float *out, float *spread, long *sound) {
  int good = 1;
#pragma omp parallel reduction(&& : good)
  {
    float *own = aligned_alloc(64, (room(n) * sizeof(float) + 63) / 64 * 64);
#pragma omp for schedule(static)
    for (long pair = 0; pair < n->b * n->g; pair++)
      good &= attend(n, pair / n->g, pair % n->g, q, k, v, bias, (float)scale, out, spread, own);
    free(own);
  }
  *sound = good;
}

void regard_attend_back(const Sizes *n, const float *q, const float *k, const float *v,
                        const float *bias, double scale, const float *out, const float *spread,
                        const float *grad, float *dq, float *dk, float *dv) {
#pragma omp parallel
  {
    float *own = aligned_alloc(64, (room_back(n) * sizeof(float) + 63) / 64 * 64);
#pragma omp for schedule(static)
    for (long pair = 0; pair < n->b * n->g; pair++)
      attend_back(n, pair / n->g, pair % n->g, q, k, v, bias, (float)scale, out, spread, grad, dq,
                  dk, dv, own);
    free(own);
  }
}

/* dx is the gradient of a norm plus what came round it; those of its weights are added up */
static void norm_back(const float *x, const float *weight, const float *about, const float *grad,
                      const float *skip, float *dx, float *dweight, float *dshift, long rows,
                      long w, long centred) {
  for (long i = 0; i < rows; i++, x += w, grad += w, skip += w, dx += w) {
    float mean = about[2 * i], by = about[2 * i + 1], sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (long c = 0; c < w; c++) {
      float z = (x[c] - mean) * by, h = grad[c] * weight[c];
      sum += h;
      dot += h * z;
      dweight[c] += grad[c] * z;
    }
    if (dshift)
#pragma omp simd
      for (long c = 0; c < w; c++) dshift[c] += grad[c];
    sum = centred ? sum / w : 0.0f;
    dot /= w;
#pragma omp simd
    for (long c = 0; c < w; c++)
      dx[c] = by * (grad[c] * weight[c] - sum - (x[c] - mean) * by * dot) + skip[c];
  }
}

/* the activation of some numbers; a gradient, if there is one, is multiplied by its slope */
INLINE void bent(long act, const float *x, const float *bias, float *y, float *grad, long rows,
                 long w) {
  for (long i = 0; i < rows; i++, x += w, y += w, grad = grad ? grad + w : 0)
    for (long c = 0; c < w; c += LANES) {
      vec z = load(x + c), slope;
      if (bias) z += load(bias + c);
      store(y + c, activate(act, z, grad ? &slope : 0));
      if (grad) store(grad + c, load(grad + c) * slope);
    }
}

static void activate_rows(long act, const float *x, const float *bias, float *y, float *grad, long rows,
                      long w) {
  switch (act) {
  case RELU: bent(RELU, x, bias, y, grad, rows, w); break;
  case GELU: bent(GELU, x, bias, y, grad, rows, w); break;
  case GELU_TANH: bent(GELU_TANH, x, bias, y, grad, rows, w); break;
  default: bent(SILU, x, bias, y, grad, rows, w);
  }
}

/* c (m, n) = op(a) op(b) + keep c, all laid by rows */
static void product(int m, int n, int k, const float *a, int a_turned, const float *b, int b_turned,
                    float keep, float *c) {
  float one = 1.0f;
  sgemm_(b_turned ? "T" : "N", a_turned ? "T" : "N", &n, &m, &k, &one, b, b_turned ? &k : &n, a,
         a_turned ? &m : &k, &keep, c, &n);
}

/* rows of a bias, or of something else plus a bias */
static void begin(float *y, const float *x, const float *bias, long rows, long w) {
  for (long i = 0; i < rows; i++)
#pragma omp simd
    for (long c = 0; c < w; c++) y[i * w + c] = (x ? x[i * w + c] : 0.0f) + (bias ? bias[c] : 0.0f);
}

static void add_rows(const float *x, float *sum, long rows, long w) {
  if (sum)
    for (long i = 0; i < rows; i++)
#pragma omp simd
      for (long c = 0; c < w; c++) sum[c] += x[i * w + c];
}

/* turn the heads of a row by cos, cos, -sin, sin, or back again */
static void rotate(float *x, const float *by, long heads, long d, float way) {
  for (long h = 0; h < heads; h++, x += d)
    for (long c = 0; c < d / 2; c++) {
      float a = x[c], b = x[c + d / 2], sine = way * by[d + d / 2 + c];
      x[c] = a * by[c] - b * sine;
      x[c + d / 2] = b * by[c] + a * sine;
    }
}

typedef struct {
  const float *norm_1, *shift_1, *qkv, *qkv_bias, *out, *out_bias;
  const float *norm_2, *shift_2, *gate, *gate_bias, *inner, *inner_bias, *outer, *outer_bias;
} Weights;

typedef struct {
  float *norm_1, *shift_1, *qkv, *qkv_bias, *out, *out_bias;
  float *norm_2, *shift_2, *gate, *gate_bias, *inner, *inner_bias, *outer, *outer_bias;
} Slopes;

/* texts (b, l, w), some of which are gone through at once; the rotation (b or 1, l, 2 d) */
typedef struct {
  long b, l, w, h, g, d, f, act, centred, causal, some;
  long turn_b, turn_l, bias_b, bias_h, bias_q;
  double eps, scale;
} Block;

/* what is kept for the way back: all of (b, l, ...) */
typedef struct {
  float *qkv, *seen, *spread, *middle, *gate, *inner, *about_1, *about_2;
} Kept;

static Sizes heads_of(const Block *n) {
  long d = n->d, wide = n->h * d, each = wide + 2 * n->g * d;
  return (Sizes){.b = 1, .h = n->h, .g = n->g, .q = n->l, .k = n->l, .d = d, .causal = n->causal,
                 .q_h = d, .q_l = each, .k_h = d, .k_l = each, .v_h = d, .v_l = each,
                 .bias_h = n->bias_h, .bias_q = n->bias_q,
                 .out_h = d, .out_l = wide, .grad_h = d, .grad_l = wide,
                 .dq_h = d, .dq_l = each, .dk_h = d, .dk_l = each, .dv_h = d, .dv_l = each};
}

static int finite_rows(const float *x, long count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long c = 0; c < count; c++) sum += x[c] * 0.0f;
  return sum == 0.0f;
}

void regard_block(const Block *n, const Weights *p, const float *x, const float *turn,
                  const float *bias, const Kept *kept, float *y, long *sound) {
  int good = 1;
  long w = n->w, each = (n->h + 2 * n->g) * n->d, wide = n->h * n->d, f = n->f;
  Sizes heads = heads_of(n);
#pragma omp parallel reduction(&& : good)
  {
    long most = n->some * n->l;
    float *own = aligned_alloc(64, ((most * (w + f) + room(&heads)) * sizeof(float) + 63) / 64 * 64);
    float *normal = own, *active = normal + most * w, *rest = active + most * f;
#pragma omp for schedule(dynamic)
    for (long first = 0; first < n->b; first += n->some) {
      long count = n->b - first < n->some ? n->b - first : n->some, rows = count * n->l;
      long at = first * n->l;
      const float *from = x + at * w;
      float *qkv = kept->qkv + at * each, *seen = kept->seen + at * wide;
      float *middle = kept->middle + at * w, *inner = kept->inner + at * f, *to = y + at * w;
      norm(from, p->norm_1, p->shift_1, normal, kept->about_1 + 2 * at, rows, w, n->centred, n->eps);
      begin(qkv, 0, p->qkv_bias, rows, each);
      product(rows, each, w, normal, 0, p->qkv, 1, 1.0f, qkv);
      for (long s = 0; s < count; s++) {
        float *own_qkv = qkv + s * n->l * each;
        const float *by = turn ? turn + (first + s) * n->turn_b : 0;
        for (long i = 0; by && i < n->l; i++)
          rotate(own_qkv + i * each, by + i * n->turn_l, n->h + n->g, n->d, 1.0f);
        for (long g = 0; g < n->g; g++)
          good &= attend(&heads, 0, g, own_qkv, own_qkv + wide, own_qkv + wide + n->g * n->d,
                         bias ? bias + (first + s) * n->bias_b : 0, n->scale,
                         seen + s * n->l * wide, kept->spread + 2 * (first + s) * n->h * n->l,
                         rest);
      }
      begin(middle, from, p->out_bias, rows, w);
      product(rows, w, wide, seen, 0, p->out, 1, 1.0f, middle);
      norm(middle, p->norm_2, p->shift_2, normal, kept->about_2 + 2 * at, rows, w, n->centred,
           n->eps);
      product(rows, f, w, normal, 0, p->inner, 1, 0.0f, inner);
      if (p->gate) {
        float *gate = kept->gate + at * f;
        product(rows, f, w, normal, 0, p->gate, 1, 0.0f, gate);
        activate_rows(n->act, gate, p->gate_bias, active, 0, rows, f);
        for (long i = 0; i < rows; i++)
#pragma omp simd
          for (long c = 0; c < f; c++)
            active[i * f + c] *= inner[i * f + c] + (p->inner_bias ? p->inner_bias[c] : 0.0f);
      } else
        activate_rows(n->act, inner, p->inner_bias, active, 0, rows, f);
      begin(to, middle, p->outer_bias, rows, w);
      product(rows, w, f, active, 0, p->outer, 1, 1.0f, to);
      good &= finite_rows(to, rows * w); /* what is not finite before is not finite here */
    }
    free(own);
  }
  *sound = good;
}

/* gradients (threads, size) of all weights, one after the other as they are in Weights, of which
 * those of the first thread are the sum in the end */
void regard_block_back(const Block *n, const Weights *p, const float *x, const float *turn,
                       const float *bias, const Kept *kept, const float *grad, float *dx,
                       float *sums, const long *offsets, long size) {
  long w = n->w, each = (n->h + 2 * n->g) * n->d, wide = n->h * n->d, f = n->f;
  Sizes heads = heads_of(n);
#pragma omp parallel
  {
    long most = n->some * n->l;
    float *own = aligned_alloc(
        64, ((most * (3 * w + 4 * f + wide + each) + room_back(&heads)) * sizeof(float) + 63) / 64 * 64);
    float *normal = own, *back = normal + most * w, *around = back + most * w;
    float *active = around + most * w, *through = active + most * f, *wider = through + most * f;
    float *gated = wider + most * f, *looked = gated + most * f, *dqkv = looked + most * wide;
    float *rest = dqkv + most * each, *mine = sums + omp_get_thread_num() * size;
    float *to[14];
    for (int i = 0; i < 14; i++) to[i] = offsets[i] < 0 ? 0 : mine + offsets[i];
    Slopes g = *(Slopes *)to;
    long vectors[14] = {w, w, 0, each, 0, w, w, w, 0, f, 0, f, 0, w};
    int fresh = 1;
#pragma omp for schedule(static)
    for (long first = 0; first < n->b; first += n->some) {
      long count = n->b - first < n->some ? n->b - first : n->some, rows = count * n->l;
      long at = first * n->l;
      const float *dy = grad + at * w, *middle = kept->middle + at * w, *from = x + at * w;
      const float *inner = kept->inner + at * f, *qkv = kept->qkv + at * each;
      const float *seen = kept->seen + at * wide;
      float keep = fresh ? 0.0f : 1.0f;
      if (fresh)
        for (int i = 0; i < 14; i++)
          if (to[i] && vectors[i]) memset(to[i], 0, vectors[i] * sizeof(float));
      fresh = 0;
      /* think */
      product(rows, f, w, dy, 0, p->outer, 0, 0.0f, wider);
      if (p->gate) {
        const float *gate = kept->gate + at * f;
        begin(through, inner, p->inner_bias, rows, f);
        for (long j = 0; j < rows * f; j++) gated[j] = wider[j] * through[j];
        activate_rows(n->act, gate, p->gate_bias, active, gated, rows, f);
        for (long j = 0; j < rows * f; j++) {
          wider[j] *= active[j];
          active[j] *= through[j];
        }
      } else
        activate_rows(n->act, inner, p->inner_bias, active, wider, rows, f);
      product(w, f, rows, dy, 1, active, 0, keep, g.outer);
      add_rows(dy, g.outer_bias, rows, w);
      add_rows(wider, g.inner_bias, rows, f);
      float *about = kept->about_2 + 2 * at;
      norm(middle, p->norm_2, p->shift_2, normal, about, rows, w, n->centred, n->eps);
      product(f, w, rows, wider, 1, normal, 0, keep, g.inner);
      product(rows, w, f, wider, 0, p->inner, 0, 0.0f, back);
      if (p->gate) {
        add_rows(gated, g.gate_bias, rows, f);
        product(f, w, rows, gated, 1, normal, 0, keep, g.gate);
        product(rows, w, f, gated, 0, p->gate, 0, 1.0f, back);
      }
      norm_back(middle, p->norm_2, about, back, dy, around, g.norm_2, g.shift_2, rows, w, n->centred);
      /* look */
      product(rows, wide, w, around, 0, p->out, 0, 0.0f, looked);
      product(w, wide, rows, around, 1, seen, 0, keep, g.out);
      add_rows(around, g.out_bias, rows, w);
      for (long s = 0; s < count; s++) {
        const float *own_qkv = qkv + s * n->l * each;
        float *own_dqkv = dqkv + s * n->l * each;
        const float *by = turn ? turn + (first + s) * n->turn_b : 0;
        for (long group = 0; group < n->g; group++)
          attend_back(&heads, 0, group, own_qkv, own_qkv + wide, own_qkv + wide + n->g * n->d,
                      bias ? bias + (first + s) * n->bias_b : 0, n->scale,
                      seen + s * n->l * wide, kept->spread + 2 * (first + s) * n->h * n->l,
                      looked + s * n->l * wide, own_dqkv, own_dqkv + wide,
                      own_dqkv + wide + n->g * n->d, rest);
        for (long i = 0; by && i < n->l; i++)
          rotate(own_dqkv + i * each, by + i * n->turn_l, n->h + n->g, n->d, -1.0f);
      }
      about = kept->about_1 + 2 * at;
      norm(from, p->norm_1, p->shift_1, normal, about, rows, w, n->centred, n->eps);
      product(each, w, rows, dqkv, 1, normal, 0, keep, g.qkv);
      add_rows(dqkv, g.qkv_bias, rows, each);
      product(rows, w, each, dqkv, 0, p->qkv, 0, 0.0f, back);
      norm_back(from, p->norm_1, about, back, around, dx + at * w, g.norm_1, g.shift_1, rows, w,
                n->centred);
    }
    free(own);
    if (fresh) memset(mine, 0, size * sizeof(float));
    long threads = omp_get_num_threads();
#pragma omp barrier
#pragma omp for schedule(static)
    for (long first = 0; first < size; first += 4096)
      for (long other = 1; other < threads; other++)
#pragma omp simd
        for (long i = first; i < (first + 4096 < size ? first + 4096 : size); i++)
          sums[i] += sums[other * size + i];
  }
}
