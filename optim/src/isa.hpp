// The ISAs compiled in, and which of them this machine runs.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.hpp"

namespace optim {

// Names, slowest first; the last is the one to use.
std::vector<std::string> available_isas();

// Throws std::invalid_argument for a name that is not available.
const KernelTable& kernel_table(const std::string& isa);

}  // namespace optim
