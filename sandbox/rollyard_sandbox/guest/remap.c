/* Moves private memory into a file and maps it back, in place, privately (mappings.py says why).

   Nothing may change between the copy of a region and its mapping, so this is C that uses only
   registers and its own stack (which is not moved): no libc, no errno, no allocation. It relies on
   the process having one thread and no signal handler that writes memory.

   Built by jail.py as a shared object: cc -O2 -shared -fPIC -nostdlib -fno-stack-protector. */

#include <sys/mman.h>
#include <sys/syscall.h>

struct region {
  unsigned long start;      /* address, a whole number of pages */
  unsigned long length;     /* bytes, a whole number of pages */
  unsigned long offset;     /* bytes, where it goes in the file */
  unsigned long protection; /* PROT_* of the new mapping */
};

#if defined(__x86_64__)
static long system_call(long number, long a, long b, long c, long d, long e, long f) {
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
}
#elif defined(__aarch64__)
static long system_call(long number, long a, long b, long c, long d, long e, long f) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc #0"
                   : "+r"(x0)
                   : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                   : "memory");
  return x0;
}
#else
#error "no system call sequence for this architecture"
#endif

enum { PAGE = 4096 }; /* copied in these units; a kernel with larger pages has multiples of it */

/* Zeros from this length on (256 KiB, a multiple of any kernel's page) become untouched anonymous
   memory. They may not be holes of the file: the first process to read a hole fills it for all,
   at the expense of its own control group and for ever, and mincore(2) shows that to the others. */
enum { ROOM = 262144 };

static int is_zero(const char *page) {
  const unsigned long *words = (const unsigned long *)page;
  for (unsigned long i = 0; i < PAGE / sizeof *words; i++)
    if (words[i]) return 0;
  return 1;
}

/* The first whole ROOM of zeros in [from, end), or end. */
static unsigned long find_room(unsigned long from, unsigned long end) {
  unsigned long at = (from + ROOM - 1) / ROOM * ROOM;
  for (; at + ROOM <= end; at += ROOM) {
    unsigned long page = at;
    while (page < at + ROOM && is_zero((const char *)page)) page += PAGE;
    if (page == at + ROOM) return at;
  }
  return end;
}

static unsigned long end_of_room(unsigned long at, unsigned long end) {
  do at += ROOM;
  while (at + ROOM <= end && find_room(at, at + ROOM) == at);
  return at;
}

static long move(long fd, const struct region *r, unsigned long from, unsigned long to) {
  unsigned long offset = r->offset + (from - r->start);
  for (unsigned long page = from; page < to; page += PAGE) {
    long written =
        system_call(SYS_pwrite64, fd, (long)page, PAGE, (long)(offset + (page - from)), 0, 0);
    if (written != PAGE) return written < 0 ? written : -5; /* EIO */
  }
  return system_call(SYS_mmap, (long)from, (long)(to - from), (long)r->protection,
                     MAP_PRIVATE | MAP_FIXED, fd, (long)offset);
}

static long make_room(const struct region *r, unsigned long from, unsigned long to) {
  return system_call(SYS_mmap, (long)from, (long)(to - from), (long)r->protection,
                     MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0);
}

/* Returns 0, or a negative errno. After an error all memory still holds what it did: a part that
   could not be copied is not mapped, and those done before are complete. */
long rollyard_remap(long fd, const struct region *regions, long count) {
  for (long i = 0; i < count; i++) {
    struct region r = regions[i];
    unsigned long end = r.start + r.length;
    for (unsigned long at = r.start; at < end;) {
      unsigned long room = find_room(at, end);
      if (room > at) {
        long moved = move(fd, &r, at, room);
        if (moved < 0 && moved > -4096) return moved;
      }
      at = room;
      if (at < end) {
        unsigned long after = end_of_room(at, end);
        long made = make_room(&r, at, after);
        if (made < 0 && made > -4096) return made;
        at = after;
      }
    }
  }
  return 0;
}
