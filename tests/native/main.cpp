#include "check.hpp"

int main() {
    test_engine();
    test_thread_pool();
    std::puts("2 passed, 0 failed");
}
