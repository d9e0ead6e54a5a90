#pragma once

#include <nanobind/nanobind.h>

void bind_file(nanobind::module_ &m);
void bind_uring(nanobind::module_ &m);
