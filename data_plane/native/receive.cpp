// Puts that come by TCP, written into a segment without Python: see
// data_plane/transport/tcp/receiver.py.
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "flag.h"

// What a writer sends before the chunks of a put: HEADER of data_plane/transport/tcp/messages.py.
struct PutHeader {
    static constexpr uint64_t MAX_CHUNKS = 8;
    uint64_t word, value, num_chunks;
    struct {
        uint64_t begin, num_bytes;
    } chunks[MAX_CHUNKS];

    // Whether its chunks and its word, of 8 bytes, are in the memory behind `data_offset`. No sum
    // of what a writer sent is compared: it could wrap.
    bool is_within(uint64_t data_offset, uint64_t memory_bytes) const {
        if (num_chunks > MAX_CHUNKS || word % 8) return false;
        if (word < data_offset || word > memory_bytes - 8) return false;
        for (uint64_t i = 0; i < num_chunks; ++i) {
            const auto [begin, num_bytes] = chunks[i];
            if (begin < data_offset || begin > memory_bytes || num_bytes > memory_bytes - begin)
                return false;
        }
        return true;
    }
};

// How a call ends: with NO_PUT the header stays for the caller, other values are of errno.
enum Ended { NO_PUT = 0, CLOSED = -1 };

// Fills the parts, none of which is empty. 0, or how the connection ended.
static int receive_all(int connection, iovec* parts, size_t num_parts) {
    while (num_parts) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = num_parts;
        ssize_t received = recvmsg(connection, &message, MSG_WAITALL);
        if (received < 0 && errno == EINTR) continue;
        if (received < 0) return errno;
        if (received == 0) return CLOSED;
        for (; num_parts && size_t(received) >= parts->iov_len; ++parts, --num_parts)
            received -= ssize_t(parts->iov_len);
        if (!num_parts) return 0;
        parts->iov_base = static_cast<char*>(parts->iov_base) + received;
        parts->iov_len -= size_t(received);
    }
    return 0;
}

extern "C" {

// Writes one put after the other into memory [memory_bytes], each word after its chunks, until the
// connection ends or a header comes that is no put into the segment. The caller says how large its
// header is: EINVAL if that is another one.
int nanocp_receive_puts(int connection, char* memory, uint64_t memory_bytes, uint64_t data_offset,
                        PutHeader* header, uint64_t header_bytes) {
    if (header_bytes != sizeof(PutHeader)) return EINVAL;
    for (;;) {
        iovec parts[PutHeader::MAX_CHUNKS] = {{header, sizeof(PutHeader)}};
        if (const int ended = receive_all(connection, parts, 1)) return ended;
        if (!header->is_within(data_offset, memory_bytes)) return NO_PUT;
        size_t num_parts = 0;
        for (uint64_t i = 0; i < header->num_chunks; ++i)
            if (const auto [begin, num_bytes] = header->chunks[i]; num_bytes)
                parts[num_parts++] = {memory + begin, num_bytes};
        if (const int ended = receive_all(connection, parts, num_parts)) return ended;
        raise_flag(reinterpret_cast<uint64_t*>(memory + header->word), header->value);
    }
}
}
