/* Decoding: the next tokens of each text through a stack of blocks, which regard/layers/kernels.py
 * describes. Products with more than two rows are the matrix library's. */
#include <omp.h>

#include "act.h"
#include "rows.h"

enum { MOST = 512 };

typedef struct {
  const float *norm_1, *shift_1, *qkv, *qkv_bias, *out, *out_bias;
  const float *norm_2, *shift_2, *gate, *gate_bias, *inner, *inner_bias, *outer, *outer_bias;
  long by_columns; /* a bit for each of qkv, out, gate, inner, outer */
} Layer;

typedef struct {
  long layers, width, heads, kv_heads, head_width, ffn_width, act, centred;
  double eps, scale;
} Shape;

/* (b, t) tokens; keys and values (b, g, room, d), of which `past` are there; the rotation (b or 1,
 * t, 2 d) and the bias (b or 1, h or 1, t or 1, k) with their steps in memory */
typedef struct {
  long sentences, tokens, room, past;
  const float *turn;
  long turn_b, turn_t;
  const float *bias;
  long bias_b, bias_h, bias_t;
  const float *last, *last_shift; /* of the norm that ends the stack, if one does */
} Step;

/* some rows of a matrix (n, k) times one or two vectors */
INLINE void dots(int m, int n, const float *x, const float *w, const float *bias, float *y, long k,
                 long step) {
  vec sums[2][8];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) sums[i][j] = (vec){0};
  long c = 0;
  for (; c + LANES <= k; c += LANES)
    for (int j = 0; j < n; j++) {
      vec part = load(w + j * k + c);
      for (int i = 0; i < m; i++) sums[i][j] += load(x + i * k + c) * part;
    }
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      float sum = total(sums[i][j]);
      for (long rest = c; rest < k; rest++) sum += x[i * k + rest] * w[j * k + rest];
      y[i * step + j] = sum + (bias ? bias[j] : 0.0f);
    }
}

static void by_rows(long m, const float *x, const float *w, const float *bias, float *y, long k,
                    long n) {
#pragma omp parallel for schedule(static) if (n * k > 8192)
  for (long first = 0; first < n; first += 8) {
    const float *rows = w + first * k, *b = bias ? bias + first : 0;
    if (first + 8 <= n) {
      if (m == 2)
        dots(2, 8, x, rows, b, y + first, k, n);
      else
        dots(1, 8, x, rows, b, y + first, k, n);
    } else
      for (long j = 0; j < n - first; j++)
        for (long i = 0; i < m; i++)
          dots(1, 1, x + i * k, rows + j * k, b ? b + j : 0, y + i * n + first + j, k, n);
  }
}

/* columns of a matrix, laid one after the other (k, n), times one or two vectors: each thread goes
 * through a stretch of all columns, which it reads in the order of memory */
static void by_columns(long m, const float *x, const float *w, const float *bias, float *y, long k,
                       long n) {
#pragma omp parallel if (n * k > 8192)
  {
    long each = (n / omp_get_num_threads() + LANES) / LANES * LANES;
    long first = each * omp_get_thread_num(), last = first + each < n ? first + each : n;
    for (; first < last; first += MOST) {
      long count = last - first < MOST ? last - first : MOST;
      float sums[2][MOST];
      for (long i = 0; i < m; i++)
        for (long j = 0; j < count; j++) sums[i][j] = bias ? bias[first + j] : 0.0f;
      for (long c = 0; c < k; c += 4) {
        const float *from = w + first + c * n;
        long rows = k - c < 4 ? k - c : 4;
        for (long i = 0; i < m; i++) {
          const float *a = x + i * k + c;
          float *to = sums[i];
          long j = 0;
          if (rows == 4)
            for (; j + LANES <= count; j += LANES)
              store(to + j, load(to + j) + a[0] * load(from + j) + a[1] * load(from + n + j) +
                                a[2] * load(from + 2 * n + j) + a[3] * load(from + 3 * n + j));
          for (; j < count; j++)
            for (long r = 0; r < rows; r++) to[j] += a[r] * from[r * n + j];
        }
      }
      for (long i = 0; i < m; i++)
        for (long j = 0; j < count; j++) y[i * n + first + j] = sums[i][j];
    }
  }
}

static void product(long m, const float *x, const float *w, const float *bias, float *y, long k,
                    long n, int columns) {
  if (m <= 2) {
    (columns ? by_columns : by_rows)(m, x, w, bias, y, k, n);
    return;
  }
  if (bias)
    for (long i = 0; i < m; i++)
      for (long j = 0; j < n; j++) y[i * n + j] = bias[j];
  int rows = (int)m, inner = (int)k, wide = (int)n;
  float one = 1.0f, keep = bias ? 1.0f : 0.0f;
  sgemm_(columns ? "N" : "T", "N", &wide, &rows, &inner, &one, w, columns ? &wide : &inner, x,
         &inner, &keep, y, &wide);
}

INLINE void activate_row(long act, float *x, const float *other, long count) {
  long c = 0;
  for (; c + LANES <= count; c += LANES) {
    vec y = activate(act, load(x + c), 0);
    store(x + c, other ? y * load(other + c) : y);
  }
  if (c < count) {
    vec rest = {0};
    for (long j = c; j < count; j++) rest[j - c] = x[j];
    rest = activate(act, rest, 0);
    for (long j = c; j < count; j++) x[j] = other ? rest[j - c] * other[j] : rest[j - c];
  }
}

static void activate_all(long act, float *x, const float *other, long count) {
  enum { PART = 1024 };
#pragma omp parallel for schedule(static) if (count > 4 * PART)
  for (long first = 0; first < count; first += PART) {
    long some = count - first < PART ? count - first : PART;
    const float *gated = other ? other + first : 0;
    switch (act) {
    case RELU: activate_row(RELU, x + first, gated, some); break;
    case GELU: activate_row(GELU, x + first, gated, some); break;
    case GELU_TANH: activate_row(GELU_TANH, x + first, gated, some); break;
    default: activate_row(SILU, x + first, gated, some);
    }
  }
}

/* turn pairs (i, i + d/2) by cos, cos, -sin, sin */
static void rotated(const float *x, const float *by, float *y, long d) {
  for (long c = 0; c < d / 2; c++) {
    float a = x[c], b = x[c + d / 2];
    y[c] = a * by[c] + b * by[d + c];
    y[c + d / 2] = b * by[c + d / 2] + a * by[d + c + d / 2];
  }
}

/* what one query sees of its keys, which are one after the other */
INLINE void attend(long d, const float *q, const float *k, const float *v, const float *bias,
                 float scale, float *weights, float *y, long keys) {
  float most = -INFINITY, sum = 0;
  int broken = 0, open = 0;
  for (long j = 0; j < keys; j++) {
    vec sums = {0};
    float dot = 0;
    long c = 0;
    for (; c + LANES <= d; c += LANES) sums += load(q + c) * load(k + j * d + c);
    dot = total(sums);
    for (; c < d; c++) dot += q[c] * k[j * d + c];
    dot = dot * scale + (bias ? bias[j] : 0.0f);
    if (bias && bias[j] == -INFINITY)
      dot = -INFINITY; /* whatever stands there */
    else
      open = 1;
    weights[j] = dot;
    most = dot > most ? dot : most;
    broken |= dot != dot;
  }
  broken |= open && most == -INFINITY; /* too far below to be told apart */
  for (long j = 0; j < d; j++) y[j] = broken ? NAN : 0.0f;
  if (broken || most == -INFINITY) return;
  for (long j = 0; j < keys; j += LANES) {
    store(weights + j, exp_lanes(load(weights + j) - most)); /* there is room for a few more */
    for (long i = j; i < j + LANES && i < keys; i++) sum += weights[i];
  }
  float share = 1.0f / sum;
  long c = 0;
  for (; c + LANES <= d; c += LANES) {
    vec sums = {0};
    for (long j = 0; j < keys; j++)
      if (!bias || bias[j] != -INFINITY) sums += weights[j] * load(v + j * d + c);
    store(y + c, sums * share);
  }
  for (; c < d; c++) {
    for (long j = 0; j < keys; j++)
      if (!bias || bias[j] != -INFINITY) y[c] += weights[j] * v[j * d + c];
    y[c] *= share;
  }
}

/* Returns with the last vectors in x, normalised if they are to be. Scratch holds all that is made on the way, and the queries of
 * each layer (layers, b, t, h, d) as they were asked. */
void regard_decode(const Shape *s, const Layer *layers, const Step *now, float *const *keys,
                  float *const *values, float *x, float *queries, float *scratch) {
  long t = now->tokens, rows = now->sentences * t, d = s->head_width, h = s->heads;
  long g = s->kv_heads, each = (h + 2 * g) * d, count = now->past + t, room = count + LANES;
  float *y = scratch, *qkv = y + rows * s->width, *seen = qkv + rows * each;
  float *wide = seen + rows * h * d, *more = wide + rows * s->ffn_width;
  float *weights = more + rows * s->ffn_width;
  for (long i = 0; i < s->layers; i++, layers++, queries += rows * h * d) {
    long columns = layers->by_columns;
    norm(x, layers->norm_1, layers->shift_1, y, 0, rows, s->width, s->centred, s->eps);
    product(rows, y, layers->qkv, layers->qkv_bias, qkv, s->width, each, columns & 1);
#pragma omp parallel for schedule(static) if (rows * h * count * d > 8192)
    for (long pair = 0; pair < now->sentences * g; pair++) {
      long b = pair / g, group = pair % g;
      float *k = keys[i] + pair * now->room * d, *v = values[i] + pair * now->room * d;
      for (long j = 0; j < t; j++) {
        const float *from = qkv + (b * t + j) * each;
        const float *by = now->turn ? now->turn + b * now->turn_b + j * now->turn_t : 0;
        const float *new_k = from + (h + group) * d, *new_v = from + (h + g + group) * d;
        float *to = k + (now->past + j) * d;
        if (by)
          rotated(new_k, by, to, d);
        else
          for (long c = 0; c < d; c++) to[c] = new_k[c];
        for (long c = 0; c < d; c++) v[(now->past + j) * d + c] = new_v[c];
        for (long head = group * (h / g); head < (group + 1) * (h / g); head++) {
          float *q = queries + ((b * t + j) * h + head) * d;
          if (by)
            rotated(from + head * d, by, q, d);
          else
            for (long c = 0; c < d; c++) q[c] = from[head * d + c];
        }
      }
      for (long j = 0; j < t; j++)
        for (long head = group * (h / g); head < (group + 1) * (h / g); head++) {
          long row = (b * t + j) * h + head;
          const float *bias = now->bias;
          if (bias) bias += b * now->bias_b + head * now->bias_h + j * now->bias_t;
          float *q = queries + row * d, *to = seen + row * d, *w = weights + pair * room;
          float scale = (float)s->scale;
          switch (d) {
          case 32: attend(32, q, k, v, bias, scale, w, to, count); break;
          case 48: attend(48, q, k, v, bias, scale, w, to, count); break;
          case 64: attend(64, q, k, v, bias, scale, w, to, count); break;
          case 128: attend(128, q, k, v, bias, scale, w, to, count); break;
          default: attend(d, q, k, v, bias, scale, w, to, count);
          }
        }
    }
    product(rows, seen, layers->out, layers->out_bias, y, h * d, s->width, columns & 2);
    for (long c = 0; c < rows * s->width; c++) x[c] += y[c];
    norm(x, layers->norm_2, layers->shift_2, y, 0, rows, s->width, s->centred, s->eps);
    product(rows, y, layers->inner, layers->inner_bias, wide, s->width, s->ffn_width, columns & 8);
    if (layers->gate) {
      product(rows, y, layers->gate, layers->gate_bias, more, s->width, s->ffn_width, columns & 4);
      activate_all(s->act, more, wide, rows * s->ffn_width);
    } else
      activate_all(s->act, wide, 0, rows * s->ffn_width);
    float *bent = layers->gate ? more : wide;
    product(rows, bent, layers->outer, layers->outer_bias, y, s->ffn_width, s->width, columns & 16);
    for (long c = 0; c < rows * s->width; c++) x[c] += y[c];
  }
  if (now->last) norm(x, now->last, now->last_shift, x, 0, rows, s->width, s->centred, s->eps);
}
