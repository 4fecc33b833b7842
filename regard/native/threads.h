/* A piece of work on several threads, of a stack that does not depend on the shell's limits. */
#include <pthread.h>

typedef struct {
  void (*part)(const void *job, long part, long parts);
  const void *job;
  long number, count;
} Share;

static void *do_share(void *given) {
  Share *one = given;
  one->part(one->job, one->number, one->count);
  return 0;
}

/* call part(job, i, count) for each i, at once where threads can be had */
static void in_parts(void (*part)(const void *, long, long), const void *job, long count) {
  enum { MOST_THREADS = 256 };
  Share shares[MOST_THREADS];
  pthread_t threads[MOST_THREADS];
  int started[MOST_THREADS] = {0};
  pthread_attr_t settings;
  count = count > MOST_THREADS ? MOST_THREADS : count < 1 ? 1 : count;
  pthread_attr_init(&settings);
  pthread_attr_setstacksize(&settings, 1 << 20);
  for (long i = 0; i < count; i++) {
    shares[i] = (Share){part, job, i, count};
    started[i] = i && !pthread_create(threads + i, &settings, do_share, shares + i);
  }
  do_share(shares);
  for (long i = 1; i < count; i++)
    if (started[i])
      pthread_join(threads[i], 0);
    else
      do_share(shares + i);
  pthread_attr_destroy(&settings);
}
