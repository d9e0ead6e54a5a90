#pragma once

#include <cstdint>

// What the file system says about direct I/O on an open file.
struct DirectIo {
    bool reported;              // false: this kernel or file system does not say (statx before 6.1, tmpfs, network)
    uint32_t memory_alignment;  // bytes; 0 when direct I/O is not possible
    uint32_t offset_alignment;  // bytes; 0 when direct I/O is not possible
};

// Throws std::system_error when fd cannot be examined at all.
DirectIo direct_io_of(int fd);
