#pragma once

#include <cstdint>

// Probabilities per request; the meaning of each is documented in aio_native/faults.py.
struct FaultSpec {
    uint64_t seed = 0;
    double short_transfer = 0, eintr = 0, eagain = 0, eio = 0, enospc = 0, delay = 0, reorder = 0;
    uint32_t max_delay_us = 0;
    bool enabled = false;
};

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): small, seedable with any value, good enough to choose victims.
class FaultSource {
public:
    explicit FaultSource(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    bool strikes(double probability) {
        return probability > 0 && static_cast<double>(next() >> 11) * 0x1p-53 < probability;
    }
    uint64_t below(uint64_t bound) { return bound ? next() % bound : 0; }

private:
    uint64_t state_;
};
