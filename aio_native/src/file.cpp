#include "file.hpp"

#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace {

// The kernel's struct statx up to the fields we read. Declared here because C libraries older than the kernel lack
// stx_dio_mem_align; the layout is kernel ABI and never changes (linux/stat.h).
struct KernelStatx {
    uint32_t mask;
    unsigned char skipped[148];
    uint32_t dio_mem_align;
    uint32_t dio_offset_align;
    unsigned char rest[96];
};
static_assert(sizeof(KernelStatx) == 256);

constexpr uint32_t statx_dioalign = 0x2000;

}  // namespace

DirectIo direct_io_of(int fd) {
    KernelStatx answer{};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, statx_dioalign, &answer) != 0) {
        if (errno == ENOSYS) return {false, 0, 0};
        throw std::system_error(errno, std::generic_category(), "statx");
    }
    if (!(answer.mask & statx_dioalign)) return {false, 0, 0};
    return {true, answer.dio_mem_align, answer.dio_offset_align};
}
