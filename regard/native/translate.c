/* Sentences translated by an encoder-decoder: a thread a core takes them from one queue. Each step
 * runs all hypotheses of all its sentences as rows of one product; a finished sentence leaves, and a
 * waiting one joins at once. regard/decode/search.py says the same in Python and is the reference;
 * regard/layers/fast/engine.py calls this. */
#include "block.h"

enum { STRETCH = 16 * PANEL }; /* columns of the vocabulary that stay in the cache */
enum { PATIENCE, EARLY, LENGTH, NEVER }; /* as in search.STOPPINGS */

/* Sentences have places, of which the queue names the next ones in turn: the n-th at n modulo `places`. */
typedef struct {
  long sentences, beam, n_best, greedy, stopping, bos, eos, threads, rows, longest, reads, ends, places;
  double enough;
  /* sentences: that were put into the queue so far; rows: of scratch; longest: text; reads: longest source */
  const long *queue, *length, *limit; /* tokens of each source, and the most of each text */
  const int *ids, *end; /* (places, reads): sources; other tokens that end a text */
  const int *forced; /* (places, longest): tokens that texts must begin with */
  const long *forced_count;
  const char *dropped; /* whether a sentence is given up */
  char *left; /* whether it has left, as it is done or given up */
  const float *open; /* bias of the vocabulary without what is forbidden, -inf beyond it */
  const double *divisor; /* by length, up to longest */
  const float *source_at, *target_at; /* what positions add to embeddings */
  /* what they add to scores, if anything, by head and by how far a key stands after the query, from
   * 1 - reads and 1 - longest on */
  const float *source_bias, *target_bias;
  long source_span, target_span;
  /* for each place and each of n_best: tokens, how many, log-probabilities so far, how many, score */
  int *texts;
  long *counts, *steps;
  float *passed;
  double *scores;
} Job;

typedef struct {
  double score;
  long count, steps;
  int *ids;
  float *passed;
} Text;

/* a token that a hypothesis may go on with */
typedef struct {
  float score;
  int parent, token;
} Way;

/* sentences that are read together, and how many of them are not done */
typedef struct {
  long rows, users;
  float memory[]; /* (blocks, rows, 2 width): keys and values */
} Group;

typedef struct {
  long place, length, limit, step, live, done; /* live: hypotheses */
  long forced; /* tokens that its text must begin with: they stand in `written` from the first step on */
  Group *group;
  const float *memory; /* where its own begins */
  float *cache;        /* (blocks, limit, beam, 2 width), each written once */
  unsigned char *path; /* (beam, limit): in which place of the beam the past of a hypothesis stood */
  int *written;        /* (beam, limit) */
  float *passed;       /* (beam, limit): log-probability after each token */
  char *spare;         /* room for one of these */
  Text *texts;
  long finished, room;
  double bar;
} Sentence;

typedef struct {
  Desk desk;
  const Job *job;
  long *next; /* of the queue */
  int broken; /* a number is not finite, or memory is missing */
  long room, most, count, waiting, beam; /* most: sentences at once, now; waiting: read, but not begun */
  long kept, places; /* best tokens of a row, and room for as many and more, a multiple of LANES */
  Sentence *live, *next_ones;
  float *logits, *top, *sum, *scores; /* of all rows */
  int *tokens, *must; /* must: the token that a row has to go on with, or -1 */
  float *own;         /* the logit of that token */
  Way *found;
} Worker;

/* read sentences into their memory, all of their tokens as rows */
static void encode(Worker *k, Group *group, const Sentence *some, long count) {
  const Engine *e = k->desk.engine;
  const Shape *s = &e->shape;
  long w = s->width, d = s->head_width, hd = s->heads * d, rows = 0;
  for (long i = 0; i < count; i++)
    for (long j = 0; j < some[i].length; j++, rows++)
      embed(e->source, e->source_row, e->source_column, k->job->source_at, s->source_scale,
            k->job->ids[some[i].place * k->job->reads + j], j, w, k->desk.x + rows * w);
  if (e->source_norm) normalise(s, k->desk.x, e->source_norm, e->source_shift, k->desk.x, rows);
  const float *bias = k->job->source_bias;
  for (long n = 0; n < s->readers; n++) {
    const Block *b = e->blocks + n;
    project(&k->desk, rows, enter(&k->desk, b->norm_1, b->shift_1, rows), &b->qkv, k->desk.wide, STORE);
    const float *own = k->desk.wide;
    for (long i = 0, row = 0; i < count; own += some[i].length * 3 * hd, i++) {
      const float **keys = k->desk.keys, **values = k->desk.values;
      for (long j = 0; j < some[i].length; j++) keys[j] = own + j * 3 * hd + hd, values[j] = keys[j] + hd;
      fill_up(keys, some[i].length);
      for (long j = 0; j < some[i].length; j++, row++)
        attend(s, 0, s->heads, own + j * 3 * hd, k->desk.y + row * hd,
               &(Sight){keys, values, some[i].length, d, d, bias ? bias + k->job->reads - 1 - j : 0, k->job->source_span},
               k->desk.weights);
    }
    add(&k->desk, k->desk.y, &b->out, b->norm_1, b->shift_1, rows);
    feed_forward(&k->desk, b, rows);
  }
  finish_stack(&k->desk, e->reader_norm, e->reader_shift, rows);
  for (long n = 0; n < s->writers; n++)
    project(&k->desk, rows, k->desk.y, &e->blocks[s->readers + n].memory, group->memory + n * rows * 2 * hd, STORE);
}

/* the next token of every hypothesis through the decoder, into normalised vectors y */
static long decode(Worker *k) {
  const Engine *e = k->desk.engine;
  const Shape *s = &e->shape;
  long w = s->width, d = s->head_width, hd = s->heads * d, rows = 0;
  for (long i = 0; i < k->count; i++)
    for (long h = 0; h < k->live[i].live; h++, rows++) {
      Sentence *one = k->live + i;
      int token = one->step ? one->written[h * one->limit + one->step - 1] : (int)k->job->bos;
      embed(e->target, e->target_row, e->target_column, k->job->target_at, s->target_scale, token,
            one->step, w, k->desk.x + rows * w);
      k->must[rows] = one->step < one->forced ? one->written[one->step] : -1;
    }
  if (e->target_norm) normalise(s, k->desk.x, e->target_norm, e->target_shift, k->desk.x, rows);
  const float *bias = k->job->target_bias;
  for (long n = 0; n < s->writers; n++) {
    const Block *b = e->blocks + s->readers + n;
    project(&k->desk, rows, enter(&k->desk, b->norm_1, b->shift_1, rows), &b->qkv, k->desk.wide, STORE);
    for (long i = 0, row = 0; i < k->count; i++) {
      Sentence *one = k->live + i;
      float *cache = one->cache + n * one->limit * k->beam * 2 * hd;
      const float **keys = k->desk.keys, **values = k->desk.values;
      for (long h = 0; h < one->live; h++, row++) {
        const float *own = k->desk.wide + row * 3 * hd;
        memcpy(cache + (one->step * k->beam + h) * 2 * hd, own + hd, 2 * hd * sizeof(float));
        for (long j = 0; j < one->step; j++)
          keys[j] = cache + (j * k->beam + one->path[h * one->limit + j]) * 2 * hd, values[j] = keys[j] + hd;
        keys[one->step] = own + hd, values[one->step] = own + 2 * hd;
        fill_up(keys, one->step + 1);
        const float *by = bias ? bias + k->job->longest - 1 - one->step : 0;
        attend(s, 0, s->heads, own, k->desk.y + row * hd,
               &(Sight){keys, values, one->step + 1, d, d, by, k->job->target_span}, k->desk.weights);
      }
    }
    add(&k->desk, k->desk.y, &b->out, b->norm_1, b->shift_1, rows);
    project(&k->desk, rows, enter(&k->desk, b->norm_3, b->shift_3, rows), &b->ask, k->desk.wide, STORE);
    for (long i = 0, row = 0; i < k->count; i++) {
      Sentence *one = k->live + i;
      const float *memory = one->memory + n * one->group->rows * 2 * hd, **keys = k->desk.keys, **values = k->desk.values;
      for (long j = 0; j < one->length; j++) keys[j] = memory + j * 2 * hd, values[j] = keys[j] + hd;
      fill_up(keys, one->length);
      for (long h = 0; h < one->live; h++, row++)
        attend(s, 0, s->heads, k->desk.wide + row * hd, k->desk.y + row * hd, &(Sight){keys, values, one->length, d, d},
               k->desk.weights);
    }
    add(&k->desk, k->desk.y, &b->tell, b->norm_3, b->shift_3, rows);
    feed_forward(&k->desk, b, rows);
  }
  finish_stack(&k->desk, e->writer_norm, e->writer_shift, rows);
  if (s->head_scale != 1)
    for (long c = 0; c < rows * w; c++) k->desk.y[c] *= (float)s->head_scale;
  return rows;
}

/* ---- the vocabulary: maximum, sum of exponentials and best tokens of each row in one pass */

/* put a token among sorted ones, of which equal ones stay before it; what falls out is dropped */
INLINE void put(vec *scores, whole *tokens, float own, int token) {
  vec was = *scores, before = after_one(was, INFINITY);
  whole stays = was >= own, is_here = before >= own;
  *scores = larger(was, smaller(before, all(own)));
  *tokens = (stays & *tokens) | (~stays & ((is_here & token) | (~is_here & (whole)after_one((vec)*tokens, 0))));
}

/* the same among more than LANES of them */
static void put_among(float *scores, int *tokens, long places, float own, int token) {
  for (long j = 0; j < places; j += LANES) {
    vec some = load(scores + j);
    whole theirs = *(loose_whole *)(tokens + j);
    float last = some[LANES - 1];
    int last_token = theirs[LANES - 1];
    put(&some, &theirs, own, token);
    store(scores + j, some);
    *(loose_whole *)(tokens + j) = theirs;
    if (own > last) own = last, token = last_token;
  }
}

static void read_stretch(Worker *k, long row, const float *logits, long first, long count) {
  float *scores = k->scores + row * k->places, top = k->top[row], bound = scores[k->kept - 1];
  int *tokens = k->tokens + row * k->places;
  vec large = all(top), sums = {0}, best = load(scores);
  whole best_tokens = *(loose_whole *)tokens;
  for (long c = 0; c < count; c += 4 * LANES) {
    vec a = load(logits + c);
    for (long j = LANES; j < 4 * LANES; j += LANES) a = larger(load(logits + c + j), a);
    large = larger(a, large);
    if (!above(a, bound)) continue;
    for (long j = c; j < c + 4 * LANES; j += LANES)
      for (unsigned left = above(load(logits + j), bound); left; left &= left - 1) {
        int token = (int)j + __builtin_ctz(left);
        if (k->places > LANES) put_among(scores, tokens, k->places, logits[token], (int)first + token);
        else put(&best, &best_tokens, logits[token], (int)first + token);
      }
    if (k->places == LANES) store(scores, best);
    bound = scores[k->kept - 1];
  }
  if (k->places == LANES) *(loose_whole *)tokens = best_tokens;
  float most = largest(large);
  if (most == -INFINITY) return;
  for (long c = 0; c < count; c += LANES) sums += exp_near(load(logits + c) - most);
  k->sum[row] = (top == -INFINITY ? 0 : k->sum[row] * expf(top - most)) + total(sums);
  k->top[row] = most;
}

/* logits of a row that has to go on with a token: nothing is forbidden there, as in search.py */
static void read_open(Worker *k, long row, long p, long last, float *logits) {
  Matrix head = k->desk.engine->head;
  Rounded bytes = {k->desk.rounded.bytes + row * quads(head.in) * QUAD, k->desk.rounded.scale + row};
  head.bias = (float *)k->job->open;
  multiply(1, k->desk.y + row * head.in, &bytes, &head, p, last, logits, STRETCH, STRETCH, STORE, 0);
  long token = k->must[row] - p * PANEL;
  if (token >= 0 && token < (last - p) * PANEL) k->own[row] = logits[token];
}

static void read_vocabulary(Worker *k, long rows) {
  const Matrix *head = &k->desk.engine->head;
  for (long i = 0; i < rows; i++) k->top[i] = -INFINITY, k->sum[i] = 0;
  for (long i = 0; i < rows * k->places; i++) k->scores[i] = -INFINITY, k->tokens[i] = 0;
  if (head->bytes) round_rows(rows, k->desk.y, head->in, &k->desk.rounded);
  for (long p = 0; p < head->panels; p += STRETCH / PANEL) {
    long last = p + STRETCH / PANEL < head->panels ? p + STRETCH / PANEL : head->panels;
    long count = (last - p) * PANEL, padded = (count + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
    multiply(rows, k->desk.y, &k->desk.rounded, head, p, last, k->logits, STRETCH, STRETCH, STORE, 0);
    for (long i = 0; i < rows; i++) {
      if (k->must[i] >= 0) read_open(k, i, p, last, k->logits + i * STRETCH);
      for (long c = count; c < padded; c++) k->logits[i * STRETCH + c] = -INFINITY;
      read_stretch(k, i, k->logits + i * STRETCH, p * PANEL, padded);
    }
  }
  for (long i = 0; i < rows; i++) {
    float all_sum = k->top[i] + logf(k->sum[i]);
    k->broken |= !(all_sum - all_sum == 0);
    if (k->must[i] >= 0) k->scores[i * k->places] = k->own[i], k->tokens[i * k->places] = k->must[i];
    for (long j = 0; j < k->kept; j++) k->scores[i * k->places + j] -= all_sum;
  }
}

/* ---- the search, as in search.py */

static int add_text(Worker *k, Sentence *one, const Way *way) {
  const Job *job = k->job;
  if (one->finished == one->room) {
    Text *more = realloc(one->texts, (2 * one->room + 8) * sizeof(Text));
    if (!more) return 0;
    one->texts = more;
    one->room = 2 * one->room + 8;
  }
  Text *text = one->texts + one->finished;
  text->ids = malloc((one->limit + 1) * (sizeof(int) + sizeof(float)));
  if (!text->ids) return 0;
  text->passed = (float *)(text->ids + one->limit + 1);
  memcpy(text->ids, one->written + way->parent * one->limit, one->step * sizeof(int));
  memcpy(text->passed, one->passed + way->parent * one->limit, one->step * sizeof(float));
  text->passed[one->step] = way->score;
  text->count = one->step;
  if (way->token != job->eos) text->ids[text->count++] = way->token;
  text->steps = one->step + 1;
  text->score = (double)way->score / job->divisor[text->steps];
  one->finished++;
  return 1;
}

/* the score that a text must beat to be among the best so many */
static double bar_of(const Sentence *one, long best) {
  if (one->finished < best) return -INFINITY;
  double bar = INFINITY;
  for (long i = 0; i < one->finished; i++) {
    long above = 0, same = 0;
    for (long j = 0; j < one->finished; j++)
      above += one->texts[j].score > one->texts[i].score, same += one->texts[j].score == one->texts[i].score;
    if (above < best && best <= above + same) bar = one->texts[i].score;
  }
  return bar;
}

static int ends_text(const Job *job, int token) {
  if (token == job->eos) return 1;
  for (long i = 0; i < job->ends; i++)
    if (token == job->end[i]) return 1;
  return 0;
}

/* the best ways of all hypotheses of a sentence, whose rows begin with this one, best first; how many:
 * `kept`, or the one that there is where a token is forced */
static long merge(const Worker *k, const Sentence *one, long row) {
  long at[256] = {0}, ways = one->step < one->forced ? 1 : k->kept;
  const float *scores = k->scores + row * k->places;
  for (long n = 0; n < ways; n++) {
    long best = 0;
    float most = -INFINITY;
    for (long h = 0; h < one->live; h++) {
      if (at[h] == k->kept) continue;
      float so_far = one->step ? one->passed[h * one->limit + one->step - 1] : 0.0f;
      float score = so_far + scores[h * k->places + at[h]];
      if (score > most) most = score, best = h;
    }
    long place = (row + best) * k->places + (at[best] < k->kept ? at[best]++ : 0);
    k->found[n] = (Way){most, (int)best, k->tokens[place]};
  }
  return ways;
}

/* follow the best ways of a sentence, whose hypotheses begin with this row */
static int advance(Worker *k, Sentence *one, long row) {
  const Job *job = k->job;
  long step = one->step, limit = one->limit, last = limit == step + 1, added = 0, going = 0;
  long ways = merge(k, one, row);
  for (long n = 0; n < k->beam && n < ways; n++)
    if (k->found[n].score != -INFINITY && (last || ends_text(job, k->found[n].token))) {
      if (!add_text(k, one, k->found + n)) return 0;
      added = 1;
    }
  if (job->greedy) one->done = added;
  else if (added) {
    one->bar = bar_of(one, job->stopping == PATIENCE ? job->n_best : k->beam);
    one->done = one->finished >= job->enough;
  }
  Way next[k->beam];
  for (long n = 0; n < ways && going < k->beam; n++)
    if (!ends_text(job, k->found[n].token)) next[going++] = k->found[n];
  for (long n = 0; n < ways && going < k->beam; n++)
    if (ends_text(job, k->found[n].token)) next[going++] = k->found[n];
  if (!going) return one->done = 1;
  double now = job->divisor[step + 1], most = job->divisor[limit], reach = now;
  if ((job->stopping == PATIENCE || job->stopping == NEVER) && most > now) reach = most;
  one->done |= last || (!job->greedy && (double)next[0].score / reach <= one->bar);
  if (one->done) return 1;
  /* only the past of hypotheses moves: a byte, a token and a number a step */
  long kinds[] = {sizeof(char), sizeof(int), sizeof(float)};
  char *pasts[] = {(char *)one->path, (char *)one->written, (char *)one->passed};
  for (long i = 0; i < 3; i++) {
    long each = limit * kinds[i];
    memcpy(one->spare, pasts[i], one->live * each);
    for (long h = 0; h < going; h++) memcpy(pasts[i] + h * each, one->spare + next[h].parent * each, step * kinds[i]);
  }
  for (long h = 0; h < going; h++) {
    one->path[h * limit + step] = (unsigned char)next[h].parent;
    one->written[h * limit + step] = next[h].token;
    one->passed[h * limit + step] = next[h].score;
  }
  one->live = going;
  one->step++;
  return 1;
}

/* ---- the queue */

/* texts by their scores; of equal ones the first that ended stays the first */
static void rank(Text *texts, long count) {
  for (long i = 1; i < count; i++) {
    Text one = texts[i];
    long place = i;
    for (; place && one.score > texts[place - 1].score; place--) texts[place] = texts[place - 1];
    texts[place] = one;
  }
}

static void leave(Worker *k, Sentence *one, int keep) {
  const Job *job = k->job;
  if (keep) {
    rank(one->texts, one->finished);
    for (long n = 0; n < job->n_best && n < one->finished; n++) {
      long place = one->place * job->n_best + n;
      const Text *text = one->texts + n;
      job->counts[place] = text->count;
      job->steps[place] = text->steps;
      job->scores[place] = text->score;
      memcpy(job->texts + place * job->longest, text->ids, text->count * sizeof(int));
      memcpy(job->passed + place * job->longest, text->passed, text->steps * sizeof(float));
    }
  }
  for (long n = 0; n < one->finished; n++) free(one->texts[n].ids);
  free(one->texts);
  free(one->cache);
  if (one->group && !--one->group->users) free(one->group);
}

/* Take sentences from the queue, as many as there is scratch for, and read them. Where there are other
 * threads, the last ones are left for whoever is done first. */
static int read_more(Worker *k) {
  const Job *job = k->job;
  const Shape *s = &k->desk.engine->shape;
  long first = __atomic_load_n(k->next, __ATOMIC_RELAXED), count, rows;
  do {
    long left = job->sentences - first, share = job->threads > 1 ? left / (2 * job->threads) : left;
    for (count = rows = 0; count < left && count < k->most && (!count || count < share); count++) {
      long length = job->length[job->queue[(first + count) % job->places]];
      if (count && rows + length > job->rows) break;
      rows += length;
    }
  } while (!__atomic_compare_exchange_n(k->next, &first, first + count, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  if (!count) return 1;
  long each = 2 * s->heads * s->head_width;
  Group *group = malloc(sizeof(Group) + s->writers * rows * each * sizeof(float));
  if (!group) return 0;
  *group = (Group){rows, count};
  rows = 0;
  for (long i = 0; i < count; i++) { /* the last one is the next to begin */
    Sentence *one = k->next_ones + count - 1 - i;
    long place = job->queue[(first + i) % job->places];
    *one = (Sentence){.place = place, .limit = job->limit[place], .live = 1, .bar = -INFINITY};
    one->length = job->length[place];
    one->group = group;
  }
  for (long i = 0; i < count; rows += k->next_ones[i++].length) k->next_ones[i].memory = group->memory + rows * each;
  k->waiting = count;
  encode(k, group, k->next_ones, count);
  return 1;
}

static int join(Worker *k) {
  const Shape *s = &k->desk.engine->shape;
  while (k->count < k->most) {
    if (!k->waiting && !read_more(k)) return 0;
    if (!k->waiting) return 1;
    Sentence *one = k->live + k->count++;
    *one = k->next_ones[--k->waiting];
    long cache = s->writers * one->limit * k->beam * 2 * s->heads * s->head_width, past = k->beam * one->limit;
    one->cache = malloc((cache + 3 * past) * 4 + past);
    if (!one->cache) return 0;
    one->passed = one->cache + cache;
    one->written = (int *)(one->passed + past);
    one->spare = (char *)(one->written + past);
    one->path = (unsigned char *)(one->written + 2 * past);
    one->forced = k->job->forced_count[one->place];
    memcpy(one->written, k->job->forced + one->place * k->job->longest, one->forced * sizeof(int));
  }
  return 1;
}

/* what a thread works with */
static int equip(Worker *k) {
  const Shape *s = &k->desk.engine->shape;
  long rows = k->job->rows, hd = s->heads * s->head_width, most = s->width > hd ? s->width : hd;
  long wide = s->ffn_width > 3 * hd ? s->ffn_width : 3 * hd;
  long each = 2 * most + wide + STRETCH + 5;
  long keys = (k->job->longest > k->job->reads ? k->job->longest : k->job->reads) + LANES;
  k->desk.x = aligned_alloc(64, ((rows * each + s->heads * (keys + LANES) + LANES) * 4 + 63) / 64 * 64);
  k->desk.keys = malloc(2 * keys * sizeof(float *));
  k->desk.rounded.bytes = malloc(rows * ((wide > most ? wide : most) + QUAD));
  k->live = calloc(2 * k->room, sizeof(Sentence));
  k->scores = aligned_alloc(64, 2 * rows * k->places * sizeof(float));
  k->found = malloc(k->kept * sizeof(Way));
  if (!k->desk.x || !k->live || !k->scores || !k->found || !k->desk.keys || !k->desk.rounded.bytes) return 0;
  k->desk.y = k->desk.x + rows * most, k->desk.wide = k->desk.y + rows * most;
  k->logits = k->desk.wide + rows * wide, k->top = k->logits + rows * STRETCH, k->sum = k->top + rows;
  k->desk.rounded.scale = k->sum + rows, k->own = k->sum + 2 * rows, k->must = (int *)(k->sum + 3 * rows);
  k->desk.weights = k->sum + 4 * rows, k->desk.values = k->desk.keys + keys, k->next_ones = k->live + k->room;
  k->tokens = (int *)(k->scores + rows * k->places);
  return 1;
}

/* sentences that are done, or given up, leave */
static void dismiss(Worker *k) {
  long left = 0;
  for (long i = 0; i < k->count; i++) {
    long place = k->live[i].place, given_up = k->job->dropped[place];
    if (!given_up && !k->live[i].done) {
      k->live[left++] = k->live[i];
      continue;
    }
    leave(k, k->live + i, !given_up);
    k->job->left[place] = 1;
  }
  k->count = left;
}

/* one token more of every hypothesis; 0 where nothing is left to do, or nothing can be done */
static int take_step(Worker *k) {
  if (!k->desk.x && !equip(k)) k->broken = 1;
  if (k->broken || !join(k)) return k->broken = 1, 0;
  dismiss(k);
  if (!k->count) return k->waiting > 0;
  read_vocabulary(k, decode(k));
  for (long i = 0, row = 0, live; i < k->count && !k->broken; i++, row += live) {
    live = k->live[i].live;
    if (!advance(k, k->live + i, row)) k->broken = 1;
  }
  if (!k->broken) dismiss(k);
  return !k->broken;
}

/* threads that share a queue; each has sentences of its own */
typedef struct {
  const Job *job;
  long next, most, once; /* most: sentences of each at once; once: all take one step */
  Team alone;
  Worker workers[];
} Crew;

static void work(const void *given, long number, long threads) {
  (void)threads;
  Crew *crew = *(Crew *const *)given;
  while (take_step(crew->workers + number) && !crew->once) continue;
}

void regard_crew_free(Crew *crew) {
  for (long i = 0; crew && i < crew->job->threads; i++) {
    Worker *k = crew->workers + i;
    for (long n = 0; k->live && n < k->count; n++) leave(k, k->live + n, 0);
    while (k->live && k->waiting) leave(k, k->next_ones + --k->waiting, 0);
    free(k->desk.x);
    free(k->live);
    free(k->scores);
    free(k->found);
    free(k->desk.keys);
    free(k->desk.rounded.bytes);
  }
  free(crew);
}

/* The job is read as long as the crew lives; sentences may be added to it between runs. */
Crew *regard_crew_new(const Engine *engine, const Job *job) {
  const Shape *s = &engine->shape;
  Crew *crew = calloc(1, sizeof(Crew) + job->threads * sizeof(Worker));
  if (!crew) return 0;
  /* no more sentences at once than there is scratch for, or than these many bytes hold */
  double room = 1 << 28, each = 8.0 * s->writers * s->heads * s->head_width * (job->longest * job->beam + job->reads);
  crew->job = job, crew->alone.count = 1, crew->most = job->rows / job->beam;
  if (crew->most > 1 && crew->most * each > room) crew->most = each < room ? (long)(room / each) : 1;
  for (long i = 0; i < job->threads; i++) {
    Worker *k = crew->workers + i;
    *k = (Worker){.desk = {.engine = engine, .team = &crew->alone}, .job = job, .next = &crew->next, .beam = job->beam};
    k->kept = job->greedy ? 1 : (2 + job->ends) * job->beam;
    k->places = (k->kept + LANES - 1) / LANES * LANES;
    k->room = crew->most;
  }
  return crew;
}

/* Take a step with all sentences, or all steps. Returns 1, or 0 where a number was not finite or memory was
 * missing: then nothing can be used. */
long regard_crew_run(Crew *crew, const Engine *engine, long once) {
  long threads = crew->job->threads, all = crew->job->sentences - crew->next, needed = 1, fine = 1;
  for (long i = 0; i < threads; i++) {
    long own = crew->workers[i].count + crew->workers[i].waiting;
    all += own, needed = own ? i + 1 : needed;
  }
  for (long i = 0; i < threads; i++) { /* each has its share of them */
    Worker *k = crew->workers + i;
    long share = (all + threads - 1) / threads;
    k->most = share < crew->most ? share : crew->most;
    k->desk.engine = engine;
  }
  crew->once = once;
  if (needed < all) needed = all < threads ? all : threads;
  in_parts(work, &crew, needed);
  for (long i = 0; i < threads; i++) fine &= !crew->workers[i].broken;
  return fine;
}
