#pragma once

#include <chrono>

// Tells when the kernel has let go of a ring, the last of its requests included. A ring that is given up cannot be asked: a
// direct read under way goes on after it is closed, and nobody is told when it ends. But a ring holds the files that are
// registered with it until every request has come back. One of them is the only open end of a pipe: when the ring lets go
// of that, the other end hangs up.
class Witness {
public:
    Witness() = default;
    ~Witness();
    Witness(const Witness &) = delete;
    Witness &operator=(const Witness &) = delete;

    // A new end to register, in place of the one before; -1 where there is no descriptor for it. Until `handed_over`,
    // forked children close it, and the ring always: held there, both would outlive us.
    int renew(int ring_fd);
    // Whether the ring has taken that end. Our own copy of it is closed.
    void handed_over(bool registered);
    // Call when the ring is closed. False when the time passed first, or where the ring never took an end.
    bool wait_until_released(std::chrono::milliseconds time);
    // The ring is about to be closed: its descriptor may become somebody else's.
    void forget_ring();

private:
    int watched_ = -1;
    int given_ = -1;
    int ring_fd_ = -1;
};
