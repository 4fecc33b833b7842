/* Decoding: the next tokens of each text through a stack of blocks, which regard/layers/fast/kernels.py
 * describes. Blocks may have cross-attention to a memory. Products of many rows, and those with a
 * matrix that is laid by rows, are the matrix library's. */
#include <omp.h>

#include "act.h"
#include "rows.h"

enum { MOST = 256, FEW = 16, STRETCH = 64 };

typedef struct {
  const float *norm_1, *shift_1, *qkv, *qkv_bias, *out, *out_bias;
  const float *norm_2, *shift_2, *gate, *gate_bias, *inner, *inner_bias, *outer, *outer_bias;
  /* of cross-attention, if there is any */
  const float *norm_3, *shift_3, *ask, *ask_bias, *tell, *tell_bias;
  long by_columns; /* a bit for each of qkv, out, gate, inner, outer, ask, tell */
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
  /* what cross-attention reads: its length, the steps in memory of keys and of values (b, g, s), and
   * a bias (b or 1, h or 1, t or 1, s) */
  long memory, key_b, key_g, key_s, value_b, value_g, value_s;
  const float *memory_bias;
  long memory_bias_b, memory_bias_h, memory_bias_t;
  long threads; /* for which scratch has room */
  long memory_half; /* whether keys and values of the memory are bfloat16, d a multiple of LANES */
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

/* Up to FEW vectors times a matrix whose columns lie one after the other (k, n), in a wider one of
 * `step` numbers a column. Each thread goes through a stretch of all columns, eight of which it reads
 * at a time in the order of memory; the sums stay in its nearest cache. */
INLINE void add_columns(long m, const float *x, const float *w, float sums[FEW][MOST], long k,
                        long step, long count, long c, int columns) {
  for (long j = 0; j + LANES <= count; j += LANES) {
    vec part[8];
    for (int r = 0; r < columns; r++) part[r] = load(w + r * step + j);
    for (long i = 0; i < m; i++) {
      const float *a = x + i * k + c;
      vec even = load(sums[i] + j), odd = {0};
      for (int r = 0; r < columns; r += 2) {
        even += a[r] * part[r];
        if (r + 1 < columns) odd += a[r + 1] * part[r + 1];
      }
      store(sums[i] + j, even + odd);
    }
  }
  for (long j = count / LANES * LANES; j < count; j++)
    for (long i = 0; i < m; i++)
      for (int r = 0; r < columns; r++) sums[i][j] += x[i * k + c + r] * w[r * step + j];
}

/* not on the stack, of which a thread may have little (OMP_STACKSIZE) */
static _Thread_local float sums[FEW][MOST];

static void by_columns(long m, const float *x, const float *w, const float *bias, float *y, long k,
                       long n, long step) {
#pragma omp parallel if (n * k > 8192)
  {
    long each = (n / omp_get_num_threads() + LANES) / LANES * LANES;
    long first = each * omp_get_thread_num(), last = first + each < n ? first + each : n;
    for (; first < last; first += MOST) {
      long count = last - first < MOST ? last - first : MOST, c = 0;
      for (long i = 0; i < m; i++)
        for (long j = 0; j < count; j++) sums[i][j] = bias ? bias[first + j] : 0.0f;
      for (; c + 8 <= k; c += 8) add_columns(m, x, w + first + c * step, sums, k, step, count, c, 8);
      for (; c < k; c++) add_columns(m, x, w + first + c * step, sums, k, step, count, c, 1);
      for (long i = 0; i < m; i++)
        for (long j = 0; j < count; j++) y[i * n + first + j] = sums[i][j];
    }
  }
}

/* m vectors times n rows or columns of a matrix, which has `step` columns, or of which k are used */
static void product(long m, const float *x, const float *w, const float *bias, float *y, long k,
                    long n, int columns, long step) {
  if (columns && m <= 2 * FEW) {
    for (long i = 0; i < m; i += FEW)
      by_columns(m - i < FEW ? m - i : FEW, x + i * k, w, bias, y + i * n, k, n, step);
    return;
  }
  if (m <= 2) {
    by_rows(m, x, w, bias, y, k, n);
    return;
  }
  if (bias)
    for (long i = 0; i < m; i++)
      for (long j = 0; j < n; j++) y[i * n + j] = bias[j];
  int rows = (int)m, inner = (int)k, wide = (int)n, lead = columns ? (int)step : inner;
  float one = 1.0f, keep = bias ? 1.0f : 0.0f;
  sgemm_(columns ? "N" : "T", "N", &wide, &rows, &inner, &one, w, &lead, x, &inner, &keep, y,
         &wide);
}

/* the product of a few rows with a matrix, for whoever has only that */
void regard_product(long m, const float *x, const float *w, const float *bias, float *y, long k,
                    long n, long columns) {
  product(m, x, w, bias, y, k, n, (int)columns, n);
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

/* What the queries of one sentence (t, h, d) see of a stretch of its memory: for each of them the
 * largest score, the sum of the weights, and the sum of the weighted values, one after the other.
 * All heads of a key lie side by side, so that memory is read from one end to the other. */
INLINE vec numbers(const void *from, long at, long half) {
  return half ? load_half((const unsigned short *)from + at) : load((const float *)from + at);
}

INLINE void read_stretch(long d, long t, long h, long g, long half, const float *q, const void *k,
                         const void *v, const float *bias, const Step *now, float scale, long count,
                         float *weights, float *made) {
  for (long j = 0; j < count; j++)
    for (long head = 0; head < h; head++) {
      long key = j * now->key_s + head / (h / g) * now->key_g;
      for (long i = 0; i < t; i++) {
        const float *own = q + (i * h + head) * d;
        vec sums = {0};
        long c = 0;
        for (; c + LANES <= d; c += LANES) sums += load(own + c) * numbers(k, key + c, half);
        float dot = total(sums);
        for (; c < d; c++) dot += own[c] * ((const float *)k)[key + c];
        float more = bias ? bias[i * now->memory_bias_t + head * now->memory_bias_h + j] : 0.0f;
        weights[(i * h + head) * STRETCH + j] = more == -INFINITY ? more : dot * scale + more;
      }
    }
  for (long row = 0; row < t * h; row++) {
    float *w = weights + row * STRETCH, most = -INFINITY, sum = 0;
    int broken = 0;
    for (long j = 0; j < count; j++) {
      most = w[j] > most ? w[j] : most;
      broken |= w[j] != w[j];
    }
    for (long j = count; j < (count + LANES - 1) / LANES * LANES; j++) w[j] = -INFINITY;
    for (long j = 0; j < count; j += LANES) {
      vec part = most == -INFINITY ? (vec){0} : exp_lanes(load(w + j) - most);
      store(w + j, part);
      sum += total(part);
    }
    float *to = made + row * (d + 2);
    to[0] = most;
    to[1] = broken ? NAN : sum;
    for (long c = 0; c < d; c++) to[2 + c] = 0;
  }
  for (long j = 0; j < count; j++)
    for (long head = 0; head < h; head++) {
      long value = j * now->value_s + head / (h / g) * now->value_g;
      for (long i = 0; i < t; i++) {
        float by = weights[(i * h + head) * STRETCH + j], *to = made + (i * h + head) * (d + 2) + 2;
        if (by == 0) continue; /* whatever stands there */
        long c = 0;
        for (; c + LANES <= d; c += LANES) store(to + c, load(to + c) + by * numbers(v, value + c, half));
        for (; c < d; c++) to[c] += by * ((const float *)v)[value + c];
      }
    }
}

/* cross-attention of queries (b, t, h, d) to keys and values; scratch holds what stretches give */
static void read_memory(const Shape *s, const Step *now, const float *queries, const float *keys,
                        const float *values, float *seen, float *scratch) {
  long t = now->tokens, h = s->heads, g = s->kv_heads, d = s->head_width, rows = t * h;
  long stretches = (now->memory + STRETCH - 1) / STRETCH, each = rows * (d + 2);
  float *weights = scratch + now->sentences * stretches * each;
#pragma omp parallel for schedule(static) num_threads(now->threads)
  for (long part = 0; part < now->sentences * stretches; part++) {
    long b = part / stretches, first = part % stretches * STRETCH;
    long count = now->memory - first < STRETCH ? now->memory - first : STRETCH;
    const float *q = queries + b * rows * d, *bias = now->memory_bias;
    long size = now->memory_half ? 2 : 4;
    const char *k = (const char *)keys + size * (b * now->key_b + first * now->key_s);
    const char *v = (const char *)values + size * (b * now->value_b + first * now->value_s);
    if (bias) bias += b * now->memory_bias_b + first;
    float *w = weights + omp_get_thread_num() * rows * STRETCH, *to = scratch + part * each;
    float scale = (float)s->scale;
    if (now->memory_half && d == 64 && t == 1)
      read_stretch(64, 1, h, g, 1, q, k, v, bias, now, scale, count, w, to);
    else if (now->memory_half)
      read_stretch(d, t, h, g, 1, q, k, v, bias, now, scale, count, w, to);
    else if (d == 64 && t == 1)
      read_stretch(64, 1, h, g, 0, q, k, v, bias, now, scale, count, w, to);
    else if (d == 64)
      read_stretch(64, t, h, g, 0, q, k, v, bias, now, scale, count, w, to);
    else if (d == 32)
      read_stretch(32, t, h, g, 0, q, k, v, bias, now, scale, count, w, to);
    else
      read_stretch(d, t, h, g, 0, q, k, v, bias, now, scale, count, w, to);
  }
  for (long b = 0; b < now->sentences; b++)
    for (long row = 0; row < rows; row++) {
      const float *from = scratch + b * stretches * each + row * (d + 2);
      float most = -INFINITY, sum = 0, *to = seen + (b * rows + row) * d;
      for (long n = 0; n < stretches; n++) most = from[n * each] > most ? from[n * each] : most;
      for (long c = 0; c < d; c++) to[c] = 0;
      for (long n = 0; n < stretches; n++) {
        const float *one = from + n * each;
        float by = one[0] == -INFINITY ? 0.0f : expf(one[0] - most);
        sum += one[1] != one[1] ? NAN : by * one[1];
        for (long c = 0; c < d; c++) to[c] += by * one[2 + c];
      }
      for (long c = 0; c < d; c++) to[c] /= sum; /* nothing to see is no number */
    }
}

/* Returns with the last vectors in x, normalised if they are to be. Scratch holds all that is made on
 * the way; the queries of each layer (layers, b, t, h, d), and those of its cross-attention, stay as
 * they were asked. */
void regard_decode(const Shape *s, const Layer *layers, const Step *now, float *const *keys,
                  float *const *values, const float *const *memory_keys,
                  const float *const *memory_values, float *x, float *queries, float *asked,
                  float *scratch) {
  long t = now->tokens, rows = now->sentences * t, d = s->head_width, h = s->heads;
  long g = s->kv_heads, each = (h + 2 * g) * d, count = now->past + t, room = count + LANES;
  float *y = scratch, *qkv = y + rows * s->width, *seen = qkv + rows * each;
  float *wide = seen + rows * h * d, *more = wide + rows * s->ffn_width;
  float *weights = more + rows * s->ffn_width;
  float *parts = weights + now->sentences * g * room;
  for (long i = 0; i < s->layers; i++, layers++, queries += rows * h * d) {
    long columns = layers->by_columns;
    norm(x, layers->norm_1, layers->shift_1, y, 0, rows, s->width, s->centred, s->eps);
    product(rows, y, layers->qkv, layers->qkv_bias, qkv, s->width, each, columns & 1, each);
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
    product(rows, seen, layers->out, layers->out_bias, y, h * d, s->width, columns & 2, s->width);
    for (long c = 0; c < rows * s->width; c++) x[c] += y[c];
    if (layers->norm_3) {
      norm(x, layers->norm_3, layers->shift_3, y, 0, rows, s->width, s->centred, s->eps);
      product(rows, y, layers->ask, layers->ask_bias, asked, s->width, h * d, columns & 32, each);
      read_memory(s, now, asked, memory_keys[i], memory_values[i], seen, parts);
      product(rows, seen, layers->tell, layers->tell_bias, y, h * d, s->width, columns & 64,
              s->width);
      for (long c = 0; c < rows * s->width; c++) x[c] += y[c];
      asked += rows * h * d;
    }
    norm(x, layers->norm_2, layers->shift_2, y, 0, rows, s->width, s->centred, s->eps);
    product(rows, y, layers->inner, layers->inner_bias, wide, s->width, s->ffn_width, columns & 8,
            s->ffn_width);
    if (layers->gate) {
      product(rows, y, layers->gate, layers->gate_bias, more, s->width, s->ffn_width, columns & 4,
              s->ffn_width);
      activate_all(s->act, more, wide, rows * s->ffn_width);
    } else
      activate_all(s->act, wide, 0, rows * s->ffn_width);
    float *bent = layers->gate ? more : wide;
    product(rows, bent, layers->outer, layers->outer_bias, y, s->ffn_width, s->width, columns & 16,
            s->width);
    for (long c = 0; c < rows * s->width; c++) x[c] += y[c];
  }
  if (now->last) norm(x, now->last, now->last_shift, x, 0, rows, s->width, s->centred, s->eps);
}
