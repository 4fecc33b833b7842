/* Encoders: whole sequences through a stack of packed blocks that see all of themselves, and what decoders
 * read of them. A sequence is alone, so it has the same bits in every batch. A thread takes a chunk of rows at a time, which stays in its cache;
 * keys and values are packed like weights, so that attention, too, is two products of many rows. */
#include "block.h"

enum { CHUNK = 96, QUERIES = 2 * TALL };

typedef struct {
  long sequences, longest, threads;
  const long *lengths;
  float *x; /* (sequences, longest, width), read and written */
} Reading;

typedef struct {
  const Engine *engine;
  const Reading *job;
  Matrix *keys, *values; /* of each group of heads: (d, length) and (length, d) */
  float *queries;        /* (heads, longest, d), times the scale of scores */
  Desk *desks;           /* of each thread, for a chunk */
} Room;

/* what the cross-attention of decoders will read */
typedef struct {
  const Engine *engine;
  long sentences, length, threads, half; /* half: keys and values are bfloat16 */
  const float *memory;                   /* (sentences, length, width) */
  char *const *keys, *const *values;     /* of each block: (sentences, groups, length, d) */
  long *next;
  int *failed;
} Memories;

static inline long up(long count, long to) { return (count + to - 1) / to * to; }

/* lay out queries, keys and values of rows, which begin at `first` of their sequence */
static void spread(const Room *room, const float *wide, long first, long rows) {
  const Shape *s = &room->engine->shape;
  long h = s->heads, g = s->kv_heads, d = s->head_width;
  for (long t = first; t < first + rows; t++, wide += (h + 2 * g) * d) {
    for (long i = 0; i < h * d; i++)
      room->queries[(i / d * room->job->longest + t) * d + i % d] = wide[i] * (float)s->scale;
    for (long group = 0; group < g; group++) {
      const float *k = wide + (h + group) * d, *v = wide + (h + g + group) * d;
      const Matrix *keys = room->keys + group, *values = room->values + group;
      for (long c = 0; c < d; c++) {
        keys->packed[(t / PANEL * d + c) * PANEL + t % PANEL] = k[c];
        values->packed[(c / PANEL * values->in + t) * PANEL + c % PANEL] = v[c];
      }
    }
  }
}

/* make matrices of keys and values as long as a sequence; what is beyond it weighs nothing */
static void lengthen(const Room *room, long length) {
  const Shape *s = &room->engine->shape;
  long d = s->head_width, end = up(length, PANEL);
  for (long group = 0; group < s->kv_heads; group++) {
    Matrix *keys = room->keys + group, *values = room->values + group;
    keys->in = d, keys->out = values->in = end, keys->panels = end / PANEL;
    values->out = d, values->panels = up(d, PANEL) / PANEL;
    for (long t = 0; t < end; t++) keys->bias[t] = t < length ? 0.0f : -INFINITY;
    memset(keys->packed + (end - PANEL) * d, 0, PANEL * d * sizeof(float));
    memset(values->packed, 0, values->panels * end * PANEL * sizeof(float));
  }
}

/* what rows see of their sequence, to y (rows, heads, d) */
static void see(const Room *room, const Desk *k, long first, long rows) {
  const Shape *s = &room->engine->shape;
  long d = s->head_width, hd = s->heads * d, end = room->values->in, each = s->heads / s->kv_heads;
  for (long head = 0; head < s->heads; head++)
    for (long i = 0; i < rows; i += QUERIES) {
      long some = rows - i < QUERIES ? rows - i : QUERIES;
      const Matrix *keys = room->keys + head / each, *values = room->values + head / each;
      const float *q = room->queries + (head * room->job->longest + first + i) * d;
      float shares[QUERIES], *y = k->y + i * hd + head * d;
      multiply(some, q, &k->rounded, keys, 0, keys->panels, k->weights, end, end, STORE, 0);
      for (long j = 0; j < some; j++) {
        float *row = k->weights + j * end;
        vec most = all(-INFINITY), sums = {0};
        for (long t = 0; t < end; t += LANES) most = larger(most, load(row + t));
        float top = largest(most);
        for (long t = 0; t < end; t += LANES) {
          vec weight = exp_near(load(row + t) - top);
          store(row + t, weight);
          sums += weight;
        }
        shares[j] = 1.0f / total(sums);
      }
      multiply(some, k->weights, &k->rounded, values, 0, values->panels, y, hd, d, STORE, 0);
      for (long j = 0; j < some; j++)
        for (long c = 0; c < d; c++) y[j * hd + c] *= shares[j];
    }
}

static void read_all(const void *given, long number, Team *team) {
  const Room *room = given;
  const Engine *e = room->engine;
  const Shape *s = &e->shape;
  Team alone = {.count = 1};
  Desk *k = room->desks + number;
  k->team = &alone;
#define EACH_CHUNK                                                                                    \
  for (long first = number * CHUNK, rows; k->x = x + first * s->width,                                \
            rows = length - first < CHUNK ? length - first : CHUNK, first < length;                   \
       first += team->count * CHUNK)
  for (long i = 0; i < room->job->sequences; i++) {
    long length = room->job->lengths[i];
    float *x = room->job->x + i * room->job->longest * s->width;
    if (!number && length) lengthen(room, length);
    meet(team);
    for (const Block *b = e->blocks; b < e->blocks + s->readers; b++) {
      EACH_CHUNK {
        project(k, rows, enter(k, b->norm_1, b->shift_1, rows), &b->qkv, k->wide, STORE);
        spread(room, k->wide, first, rows);
      }
      meet(team);
      EACH_CHUNK {
        see(room, k, first, rows);
        add(k, k->y, &b->out, b->norm_1, b->shift_1, rows);
        feed_forward(k, b, rows);
      }
      meet(team); /* nobody writes keys that others still read */
    }
    if (e->writer_norm)
      EACH_CHUNK normalise(s, k->x, e->writer_norm, e->writer_shift, k->x, rows);
    if (!number) memset(x + length * s->width, 0, (room->job->longest - length) * s->width * sizeof(float));
  }
#undef EACH_CHUNK
}

/* read with threads that share each sequence */
static long read_together(const Engine *e, const Reading *job) {
  enum { MOST_READERS = 64 };
  const Shape *s = &e->shape;
  long threads = (job->longest + CHUNK - 1) / CHUNK, most_threads = job->threads < MOST_READERS ? job->threads : MOST_READERS;
  if (threads > most_threads) threads = most_threads;
  long d = s->head_width, hd = s->heads * d, g = s->kv_heads, end = up(job->longest, PANEL);
  long wide = hd + 2 * g * d > s->ffn_width ? hd + 2 * g * d : s->ffn_width, most = s->width > hd ? s->width : hd;
  long across = up(d, PANEL), each = up(CHUNK * (most + wide + 1) + QUERIES * end + 2 * PANEL, LANES);
  long largest = up((wide > most ? wide : most) + QUAD, QUAD), bytes = up(CHUNK * largest, 64);
  long group = end * d + end + across * end + across + 4 * PANEL, queries = up(hd * job->longest, LANES);
  float *block = aligned_alloc(64, up((g * up(group, LANES) + queries + threads * each) * 4 + threads * bytes, 64));
  Matrix *both = calloc(2 * g, sizeof(Matrix));
  Desk desks[MOST_READERS];
  Room room = {e, job, both, both + g, 0, desks};
  if (block && both) {
    float *at = block;
    for (long i = 0; i < g; i++, at = block + i * up(group, LANES)) {
      room.keys[i].packed = at, room.keys[i].bias = at + end * d;
      room.values[i].packed = room.keys[i].bias + end + PANEL;
      room.values[i].bias = room.values[i].packed + across * end + PANEL;
      memset(room.values[i].bias, 0, across * sizeof(float));
    }
    room.queries = at;
    at += queries;
    for (long i = 0; i < threads; i++, at += each) {
      desks[i] = (Desk){.engine = e, .y = at, .wide = at + CHUNK * most};
      desks[i].rounded.scale = desks[i].wide + CHUNK * wide;
      desks[i].weights = desks[i].rounded.scale + up(CHUNK, LANES);
      desks[i].rounded.bytes = (unsigned char *)(block + g * up(group, LANES) + queries + threads * each) + i * bytes;
    }
    together(read_all, &room, threads);
  }
  long done = block && both;
  free(block);
  free(both);
  return done;
}

/* sixteen numbers, or `count` of them, as they are or rounded to bfloat16 */
static void put(char *to, long at, vec x, long count, long half) {
  if (!half) return store_some((float *)to + at, x, count);
  bits whole_bits = (bits)x;
  uppers y = __builtin_convertvector((whole_bits + 0x7fffu + (whole_bits >> 16 & 1u)) >> 16, uppers);
  memcpy((unsigned short *)to + at, &y, (count < LANES ? count : LANES) * sizeof(short));
}

/* keys and values of memories, chunk by chunk */
static void remember_chunks(const void *given, long part, long parts) {
  const Memories *m = given;
  const Shape *s = &m->engine->shape;
  long d = s->head_width, g = s->kv_heads, both = 2 * g * d, chunks = (m->length + CHUNK - 1) / CHUNK;
  float *room = aligned_alloc(64, up((CHUNK * both + CHUNK) * 4 + CHUNK * (s->width + QUAD), 64));
  Team alone = {.count = 1};
  Desk k = {.engine = m->engine, .team = &alone, .wide = room};
  (void)part, (void)parts;
  if (!room) {
    *m->failed = 1;
    return;
  }
  k.rounded = (Rounded){(unsigned char *)(room + CHUNK * both + CHUNK), room + CHUNK * both};
  for (long i; (i = __atomic_fetch_add(m->next, 1, __ATOMIC_RELAXED)) < m->sentences * chunks;) {
    long sentence = i / chunks, first = i % chunks * CHUNK;
    long rows = m->length - first < CHUNK ? m->length - first : CHUNK;
    const float *x = m->memory + (sentence * m->length + first) * s->width;
    for (long n = 0; n < s->writers; n++) {
      project(&k, rows, x, &m->engine->blocks[s->readers + n].memory, k.wide, STORE);
      for (long side = 0; side < 2 * g; side++)
        for (long row = 0; row < rows; row++)
          for (long c = 0; c < d; c += LANES) {
            long at = ((sentence * g + side % g) * m->length + first + row) * d + c;
            vec some = load_some(k.wide + row * both + side * d + c, d - c);
            put(side < g ? m->keys[n] : m->values[n], at, some, d - c, m->half);
          }
    }
  }
  free(room);
}

/* Blocks are those with cross-attention. Returns 0 without memory. */
long regard_remember(const Engine *e, const Memories *given) {
  long next = 0;
  int failed = 0;
  Memories job = *given;
  job.engine = e, job.next = &next, job.failed = &failed;
  in_parts(remember_chunks, &job, job.threads);
  return !failed;
}

typedef struct {
  const Engine *engine;
  const Reading *job;
  long *next;
  int *failed;
} Queue;

static void read_each(const void *given, long part, long parts) {
  const Queue *queue = given;
  Reading one = *queue->job;
  (void)part, (void)parts;
  one.sequences = one.threads = 1;
  for (long i; (i = __atomic_fetch_add(queue->next, 1, __ATOMIC_RELAXED)) < queue->job->sequences;) {
    one.lengths = queue->job->lengths + i;
    one.x = queue->job->x + i * one.longest * queue->engine->shape.width;
    if (!read_together(queue->engine, &one)) *queue->failed = 1;
  }
}

/* Blocks are all without cross-attention. Returns 0 without memory. */
long regard_read(const Engine *e, const Reading *job) {
  long next = 0;
  int failed = 0;
  Queue queue = {e, job, &next, &failed};
  if (job->sequences < job->threads || job->threads == 1) return read_together(e, job);
  in_parts(read_each, &queue, job->threads);
  return !failed;
}
