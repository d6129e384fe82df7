// Puts through the exchange that need no Python: see data_plane/profiling/late_puts.py.
#include "late.h"

extern "C" {

void* nanocp_new_late_link() { return new LateLink; }

void nanocp_delete_late_link(void* link) { delete static_cast<LateLink*>(link); }

// header [header_bytes] is copied, chunks [num_chunks] are read when they are due.
void nanocp_put_late(void* link, int64_t due_ns, uint64_t* flag, uint64_t value, int connection,
                     const char* header, long header_bytes, const iovec* chunks, long num_chunks) {
    static_cast<LateLink*>(link)->put({due_ns,
                                       flag,
                                       value,
                                       connection,
                                       {header, size_t(header_bytes)},
                                       {chunks, chunks + num_chunks}});
}
}
