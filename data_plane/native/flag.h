// A flag of a region in shared memory: raised by one process, awaited by others.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

// What this thread wrote before is visible first. Wakes all who sleep on the flag.
static inline void raise_flag(uint64_t* flag, uint64_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    syscall(SYS_futex, flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
