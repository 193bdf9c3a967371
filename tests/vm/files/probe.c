/* Runs in a container. Its first act is to ask for its own CPU affinity; it logs that and every change to argv[1], one
 * line each: CLOCK_MONOTONIC in seconds, the CPU it runs on, its CPUs with commas between. Named "pause" it sleeps. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void stop(int signal) { (void)signal; _exit(0); }

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void report(FILE *log, const cpu_set_t *cpus) {
  const char *comma = "";
  fprintf(log, "%.6f %d ", now(), sched_getcpu());
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, cpus)) {
      fprintf(log, "%s%d", comma, cpu);
      comma = ",";
    }
  fputc('\n', log);
  fflush(log);
}

int main(int argc, char **argv) {
  cpu_set_t current, last;
  sched_getaffinity(0, sizeof current, &current);
  signal(SIGTERM, stop);
  signal(SIGINT, stop);
  const char *slash = strrchr(argv[0], '/');
  if (argc < 2 || !strcmp(slash ? slash + 1 : argv[0], "pause"))
    for (;;) pause();
  FILE *log = fopen(argv[1], "a");
  if (!log) return 3;
  report(log, &current);
  /* quick looks for the first seconds, then slow ones: all guest CPUs share one core of the host */
  for (double start = now();;) {
    usleep(now() - start < 3 ? 500 : 20000);
    last = current;
    sched_getaffinity(0, sizeof current, &current);
    if (!CPU_EQUAL(&current, &last)) report(log, &current);
  }
}
