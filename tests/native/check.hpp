#pragma once

#include <cstdio>
#include <cstdlib>

// Unlike assert, never compiled out, and says what was expected.
#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                   \
        }                                                                                   \
    } while (false)

void test_engine();
void test_thread_pool();
