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

static int is_zero(const char *page) {
  const unsigned long *words = (const unsigned long *)page;
  for (unsigned long i = 0; i < PAGE / sizeof *words; i++)
    if (words[i]) return 0;
  return 1;
}

/* Returns 0, or a negative errno. After an error every region is still what it was: one that could
   not be copied is not mapped, and those done before are complete. */
long rollyard_remap(long fd, const struct region *regions, long count) {
  for (long i = 0; i < count; i++) {
    struct region r = regions[i];
    for (unsigned long done = 0; done < r.length; done += PAGE) {
      const char *page = (const char *)(r.start + done);
      if (is_zero(page)) continue; /* a hole reads as zeros and takes no memory */
      long written = system_call(SYS_pwrite64, fd, (long)page, PAGE, (long)(r.offset + done), 0, 0);
      if (written != PAGE) return written < 0 ? written : -5; /* EIO */
    }
    long mapped = system_call(SYS_mmap, (long)r.start, (long)r.length, (long)r.protection,
                              MAP_PRIVATE | MAP_FIXED, fd, (long)r.offset);
    if (mapped < 0 && mapped > -4096) return mapped;
  }
  return 0;
}
