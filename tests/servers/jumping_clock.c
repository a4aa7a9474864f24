/* Preloaded into a process: its wall clock is the machine's and an offset on top, which a test sets while it runs.
 *
 * The file named by JUMPING_CLOCK holds the offset, nanoseconds as int64, and is mapped: reading it costs no call.
 * If JUMPING_CLOCK names a folder, the file is the one named by the process id there, and is created.
 * Monotonic clocks are left alone, as a real jump leaves them. A wait until a time of day ends when the moved clock
 * says so, as it does in a real kernel: a clock that is put back while somebody waits keeps them waiting. Such waits
 * are made in pieces; the end of a piece looks like a spurious wake-up, which these functions may have at any time.
 * A wait in a futex (gRPC's) is turned into the machine's time when it begins, and not looked at again.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define PIECE (SECOND / 10)

static const volatile int64_t nothing = 0;
static const volatile int64_t *offset = &nothing;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("JUMPING_CLOCK");
  struct stat found;
  if (!path || stat(path, &found)) return;
  char own[4096];
  int is_folder = S_ISDIR(found.st_mode);
  snprintf(own, sizeof own, is_folder ? "%s/%d" : "%s", path, (int)getpid());
  int file = open(own, is_folder ? O_RDWR | O_CREAT | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (is_folder && ftruncate(file, sizeof *offset)) return;
  void *at = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) offset = at;
  close(file);
}

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
#define DECLARE(name) static void *real_##name

static void *real(void **found, const char *name) {
  if (!*found) *found = dlsym(RTLD_NEXT, name);
  return *found;
}

DECLARE(clock_gettime);
DECLARE(pthread_cond_timedwait);
DECLARE(pthread_cond_clockwait);
DECLARE(cnd_timedwait);
DECLARE(sem_timedwait);
DECLARE(sem_clockwait);
DECLARE(pthread_mutex_timedlock);
DECLARE(syscall);

static int64_t ns_of(const struct timespec *t) { return (int64_t)t->tv_sec * SECOND + t->tv_nsec; }

static struct timespec at(int64_t ns) {
  if (ns < 0) ns = 0;
  return (struct timespec){.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
}

static int64_t machine_ns(void) {
  struct timespec now;
  REAL(clock_gettime)(CLOCK_REALTIME, &now);
  return ns_of(&now);
}

/* Of a wait whose clock is not told: since 2001, by the wall clock; since start, by the monotonic one. */
static int is_time_of_day(const struct timespec *t) { return t->tv_sec > 1000000000; }

/* Until when to wait now, in the machine's time, for a moment of the moved clock: at most a piece. */
static struct timespec piece_of(const struct timespec *until) {
  int64_t wanted = ns_of(until) - *offset, piece = machine_ns() + PIECE;
  return at(wanted < piece ? wanted : piece);
}

static int is_over(const struct timespec *until) { return machine_ns() + *offset >= ns_of(until); }

int clock_gettime(clockid_t clock, struct timespec *t) {
  int failed = REAL(clock_gettime)(clock, t);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *t = at(ns_of(t) + *offset);
  return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  (void)zone;
  struct timespec now = at(machine_ns() + *offset);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *t) {
  time_t now = at(machine_ns() + *offset).tv_sec;
  if (t) *t = now;
  return now;
}

int timespec_get(struct timespec *t, int base) {
  *t = at(machine_ns() + *offset);
  return base;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m,
                           const struct timespec *restrict until) {
  if (!is_time_of_day(until)) return REAL(pthread_cond_timedwait)(c, m, until);
  struct timespec piece = piece_of(until);
  int failed = REAL(pthread_cond_timedwait)(c, m, &piece);
  return failed == ETIMEDOUT && !is_over(until) ? 0 : failed;
}

int pthread_cond_clockwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, clockid_t clock,
                           const struct timespec *restrict until) {
  if (clock != CLOCK_REALTIME) return REAL(pthread_cond_clockwait)(c, m, clock, until);
  struct timespec piece = piece_of(until);
  int failed = REAL(pthread_cond_clockwait)(c, m, clock, &piece);
  return failed == ETIMEDOUT && !is_over(until) ? 0 : failed;
}

int cnd_timedwait(cnd_t *restrict c, mtx_t *restrict m, const struct timespec *restrict until) {
  struct timespec piece = piece_of(until);
  int outcome = REAL(cnd_timedwait)(c, m, &piece);
  return outcome == thrd_timedout && !is_over(until) ? thrd_success : outcome;
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict until) {
  for (;;) {
    struct timespec piece = piece_of(until);
    int failed = REAL(sem_timedwait)(s, &piece);
    if (!failed || errno != ETIMEDOUT || is_over(until)) return failed;
  }
}

int sem_clockwait(sem_t *restrict s, clockid_t clock, const struct timespec *restrict until) {
  return clock == CLOCK_REALTIME ? sem_timedwait(s, until) : REAL(sem_clockwait)(s, clock, until);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict until) {
  for (;;) {
    struct timespec piece = piece_of(until);
    int failed = REAL(pthread_mutex_timedlock)(m, &piece);
    if (failed != ETIMEDOUT || is_over(until)) return failed;
  }
}

long syscall(long number, ...) {
  va_list given;
  va_start(given, number);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
  va_end(given);
  if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
  struct timespec until;
  if (number == SYS_futex && ((int)a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    until = at(ns_of((const struct timespec *)a[3]) - *offset);
    a[3] = (long)&until;
  }
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
