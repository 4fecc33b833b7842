/* A piece of work on several threads, of a stack that does not depend on the shell's limits. */
#include <pthread.h>
#include <sched.h>
#include <time.h>

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
static inline void in_parts(void (*part)(const void *, long, long), const void *job, long count) {
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

/* threads that work on the same rows and wait for each other */
typedef struct {
  long count, waiting, round; /* count: 0 until it is known how many could be had */
} Team;

typedef struct {
  void (*part)(const void *job, long number, Team *team);
  const void *job;
  long number;
  Team *team;
} Member;

/* go on when all threads of a team are here */
static inline void meet(Team *team) {
  if (team->count == 1) return;
  long round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&team->waiting, 1, __ATOMIC_ACQ_REL) == team->count) {
    __atomic_store_n(&team->waiting, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (long tries = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; tries++)
    if (tries > 5000000) nanosleep(&(struct timespec){0, 20000}, 0); /* others have the processor */
    else if (tries > 10000 && tries % 1000 == 0) sched_yield(); /* to sleep takes longer than most waits */
}

static void *be_member(void *given) {
  Member *one = given;
  while (!__atomic_load_n(&one->team->count, __ATOMIC_ACQUIRE)) sched_yield();
  one->part(one->job, one->number, one->team);
  return 0;
}

/* call part(job, i, team) for each of up to `count` threads, as many as can be had */
static inline void together(void (*part)(const void *, long, Team *), const void *job, long count) {
  enum { MOST_MEMBERS = 64 };
  Team team = {0};
  Member members[MOST_MEMBERS];
  pthread_t threads[MOST_MEMBERS];
  pthread_attr_t settings;
  long number = 1;
  count = count > MOST_MEMBERS ? MOST_MEMBERS : count < 1 ? 1 : count;
  pthread_attr_init(&settings);
  pthread_attr_setstacksize(&settings, 1 << 20);
  for (; number < count; number++) {
    members[number] = (Member){part, job, number, &team};
    if (pthread_create(threads + number, &settings, be_member, members + number)) break;
  }
  __atomic_store_n(&team.count, number, __ATOMIC_RELEASE);
  part(job, 0, &team);
  for (long i = 1; i < number; i++) pthread_join(threads[i], 0);
  pthread_attr_destroy(&settings);
}
