/* Bytes of a file, read on several threads: one copies out of the page cache no faster than two quantize. */
#define _FILE_OFFSET_BITS 64
#include "native.h"

#ifndef _WIN32
#include <errno.h>
#include <unistd.h>

enum { STEP = 1 << 18, ENDS_EARLY = -1 };

struct file_job {
    int descriptor, error;
    int64_t offset;
    char *into;
};

static void read_bytes(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct file_job *job = pointer;
    while (begin < end) {
        ssize_t found = pread(job->descriptor, job->into + begin, (size_t)(end - begin), job->offset + begin);
        if (found > 0) {
            begin += found;
        } else if (found == 0 || errno != EINTR) {
            __atomic_store_n(&job->error, found ? errno : ENDS_EARLY, __ATOMIC_RELAXED);
            return;
        }
    }
}

/* Returns 0, -1 when the file ends before `bytes` were read, or errno. */
QKV_EXPORT int qkv_read_file(int descriptor, int64_t offset, void *into, ptrdiff_t bytes, int threads)
{
    struct file_job job = {.descriptor = descriptor, .offset = offset, .into = into};
    qkv_for(bytes, STEP, threads, read_bytes, &job);
    return job.error;
}
#endif
